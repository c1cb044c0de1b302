"""Work: a group's collectives, run one after the other in the order in which they were called."""

import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work

_TASK_ENDED: Any = object()


class _Task:
    """One collective in the queue."""

    def __init__(self, run: Callable[[], None], result: Any) -> None:
        self.run = run
        self.result = result
        self.error: Exception | None = None
        self.done = False
        self._changing = threading.Lock()
        self._ended: torch.futures.Future[None] | None = None
        self._future: torch.futures.Future[Any] | None = None

    def finish(self) -> None:
        """Run the collective, and keep its exception for the waiter. The calling thread holds the queue's lock."""
        try:
            self.run()
        except Exception as error:  # raised again where it is waited for
            self.error = error
        # The group may keep the task long after the caller has freed the message.
        self.run = _TASK_ENDED  # releases the tensors
        with self._changing:
            self.done = True
        if self._ended is not None:
            self._ended.set_result(None)

    def future(self) -> torch.futures.Future[Any]:
        """The future for waiters in C++ (DistributedDataParallel's reducer); created on first use, as that is slow.

        An exception is passed on by a callback that raises it: `set_exception` would store it as the future's result,
        which C++ would read as tensors and crash.
        """
        with self._changing:
            if self._future is None:
                ended: torch.futures.Future[None] = torch.futures.Future()
                self._future = ended.then(self._outcome)
                if not self.done:
                    self._ended = ended
                    return self._future
            else:
                return self._future
        ended.set_result(None)
        return self._future

    def _outcome(self, _: torch.futures.Future[None]) -> Any:
        """Callback of the future; PyTorch passes its exception on to the waiter, also in C++."""
        if self.error is not None:
            raise self.error
        return self.result


class WorkQueue:
    """Runs collectives in order: in the thread that waits for one, or in a thread of its own meanwhile.

    A caller that waits at once runs its collective by itself, which saves two changes of threads. The queue's own
    thread runs those for which no caller waits yet, so that backward goes on (DistributedDataParallel's buckets).

    Invariant: collectives run in the order in which they were called, one at a time, whichever thread runs them.
    `_running` is held while one runs; tasks are taken from `_waiting` only under it. The semaphore only wakes the
    thread: it may find nothing left, where a caller has run the task in the meantime.
    """

    def __init__(self) -> None:
        self._running = threading.Lock()  # held while a collective runs
        self._waiting: deque[_Task] = deque()
        self._called = threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._closed = False

    def run(self, collective: Callable[[], None]) -> None:
        """Run a collective now, after those that were called before it."""
        with self._running:
            while self._waiting:
                self._waiting.popleft().finish()
            collective()

    def add(
        self,
        collective: Callable[[], None],
        result: Any,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Work:
        """Enqueue a collective. Returns the work to wait for, which waits within `waiting()`."""
        task = _Task(collective, result)
        self._waiting.append(task)
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="samestep-collectives", daemon=True)
            self._thread.start()
        self._called.release()
        return _Called(task, self, waiting)

    def finish(self, task: _Task) -> None:
        """Return when a task has run."""
        while not task.done:
            with self._running:
                while not task.done and self._waiting:
                    self._waiting.popleft().finish()

    def close(self) -> None:
        """End the queue's thread, once it has run what was called."""
        self._closed = True
        self._called.release()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=1)

    def _serve(self) -> None:
        """Loop of the queue's thread: one turn for each call, until `close`."""
        while True:
            self._called.acquire()
            if self._closed and not self._waiting:
                return
            with self._running:
                if self._waiting:
                    self._waiting.popleft().finish()


class _Called(Work):
    """The handle of an enqueued collective."""

    def __init__(self, task: _Task, queue: WorkQueue, waiting: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__()
        self._task = task
        self._queue = queue
        self._waiting = waiting

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the collective, or run it in this thread if the queue's has not; raises its exception."""
        with self._waiting():
            self._queue.finish(self._task)
        if self._task.error is not None:
            raise self._task.error
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        return self._task.future()

    def is_completed(self) -> bool:
        return self._task.done

    def is_success(self) -> bool:
        return self._task.done and self._task.error is None

    def exception(self) -> Any:
        return self._task.error

    def result(self) -> list[Any]:
        self.wait()
        return self._task.result


class Done(Work):
    """The handle of a collective that has already run; one object serves all calls of a group."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True
