"""WorkerProcess: a process that computes a worker's gradients, so that its death is not the rank's.

The rank forks it, hands it batches, and stays in all process groups itself. Parameters and gradients lie in memory
that both share. A fork has the model, the loss and the data at once, where a new interpreter would take seconds.

GNU's OpenMP keeps a pool of threads for each thread that has computed, and a fork has none of them: it would wait for
threads that aren't there. So a thread that has computed nothing forks, and then waits for the process's end.
"""

import contextvars
import gc
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor, nn

from samestep.data.loader import StepBatch
from samestep.engines.parameter_server.shards import FlatParameters, shared_empty
from samestep.errors import UserError
from samestep.fault_tolerance.watchdog import Handle
from samestep.launch.fork_server import end_with_parent
from samestep.launch.network import sockets
from samestep.tasks.losses import TaskLoss

_STDERR = 2  # the number of its open file
_READY = b"ready"
_START_LIMIT = 60.0  # seconds; a fork is ready within tenths of one
_APART = 0.2  # seconds between checks whether a silent process is still alive
_LAST_LOOK = 5.0  # seconds to wait for the exit status of an ended process
# Between -1000 and 1000; where memory runs out, Linux ends the process with most memory and the highest value.
_OUT_OF_MEMORY_FIRST = 500


class ProcessDiedError(Exception):
    """Raised if a worker's process has ended, or its step failed other than by the user's mistake."""


@dataclass(frozen=True, kw_only=True)
class Computed:
    """A process's result of a step; its gradients are in shared memory."""

    totals: Sequence[float]  # the loss's sum and its count, as `NativeTrainer.backward` returns them
    used: frozenset[str]  # parameters that have a gradient
    seconds: float  # CPU time


@dataclass(frozen=True, kw_only=True)
class _Failed:
    reason: str  # a traceback
    mistake: str | None = None  # the user's, in words


class _Life:
    """One forked process."""

    def __init__(self, loss: TaskLoss) -> None:
        self.loss = loss  # the loss with which the process was forked
        self.connection, self.other_end = Pipe()
        self.forked = threading.Event()
        self.over = threading.Event()
        self.handle: Handle | None = None
        self._exit_code: int | None = None
        self._error: str | None = None

    def run(self, serve: Callable[["_Life"], None]) -> None:
        """Fork in a separate thread, and wait for the child's end. The child is killed when this thread ends."""
        try:
            with warnings.catch_warnings():  # about the rank's other threads, which the child does not use
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
        except OSError as error:
            self._error = f"it can't be forked: {error.strerror}"
            self.other_end.close()
            self.forked.set()
            self.over.set()
            return
        if pid == 0:
            try:
                serve(self)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        self.handle = Handle(pid)
        self.other_end.close()
        self.forked.set()
        _, status = os.waitpid(pid, 0)
        self._exit_code = os.waitstatus_to_exitcode(status)
        self.over.set()

    def send(self, message: bytes) -> None:
        try:
            self.connection.send_bytes(message)
        except (BrokenPipeError, ConnectionError):
            raise self._death() from None

    def receive(self, limit: float | None = None) -> bytes:
        """Receive the next message. Raises ProcessDiedError if the process has ended, or after `limit` seconds."""
        began = time.monotonic()
        try:
            while not self.connection.poll(_APART):
                if self.over.is_set() and not self.connection.poll(0):
                    raise self._death()
                if limit is not None and time.monotonic() - began > limit:
                    self.kill()
                    raise ProcessDiedError(f"it was not ready after {limit:.0f} s")
            return self.connection.recv_bytes()
        except (EOFError, ConnectionError):
            raise self._death() from None

    def _death(self) -> ProcessDiedError:
        self.over.wait(_LAST_LOOK)
        code = self._exit_code
        if self._error is not None:
            return ProcessDiedError(self._error)
        if code is None:
            return ProcessDiedError("it does not answer any more")
        if code < 0:
            return ProcessDiedError(f"it was killed by {signal.Signals(-code).name}")
        return ProcessDiedError(f"it ended with exit code {code}")

    def kill(self) -> None:
        """Kill the process, and wait until it has ended."""
        if self.handle is not None:
            self.handle.kill()
        self.over.wait(_LAST_LOOK)
        self.connection.close()
        if self.handle is not None:
            self.handle.close()
            self.handle = None


class WorkerProcess:
    """Computes a worker's gradients in a forked process, which can be started again after its death."""

    def __init__(
        self, model: nn.Module, flat: FlatParameters, backward: Callable[[StepBatch, TaskLoss], Tensor]
    ) -> None:
        """`backward` computes a step's gradients; `flat` is in shared memory."""
        self._model = model
        self._backward = backward
        self._flat_gradient = shared_empty(flat.values.numel(), flat.values.dtype)
        self._gradients: Mapping[str, Tensor] = {
            span.name: self._flat_gradient[span.start : span.stop].view(span.shape) for span in flat.spans
        }
        self._parameters = flat.parameters
        self._buffers: dict[str, Tensor] = {}  # by name, in shared memory
        self._life: _Life | None = None
        self.seconds = 0.0  # CPU time of all processes so far

    @property
    def memory(self) -> Tensor:
        """The shared memory through which gradients are passed."""
        return self._flat_gradient

    def start(self, loss: TaskLoss) -> None:
        """Fork a process that computes with this loss. Raises ProcessDiedError if it isn't ready in time."""
        self.close()
        self._share_buffers()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # otherwise both processes would write the buffered text
        life = self._life = _Life(loss)
        run = contextvars.copy_context().run
        threading.Thread(target=run, args=(life.run, self._serve), name="worker process", daemon=True).start()
        life.forked.wait()
        life.receive(_START_LIMIT)

    def compute(self, batch: StepBatch, loss: TaskLoss) -> tuple[Tensor, dict[str, Tensor | None]]:
        """Compute a step's loss sum and count, and each parameter's gradient, which is valid until the next step.

        Raises ProcessDiedError if the process dies, and the UserError that its step raised.
        """
        try:
            message = pickle.dumps(batch, protocol=pickle.HIGHEST_PROTOCOL)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise UserError(
                f"worker_restarts: a batch goes to a worker's process by pickle, which can't take this ({error}); "
                "use batches of tensors, numbers and text, or leave worker_restarts out"
            ) from None
        if self._life is None or self._life.loss != loss:  # a fault injection replaces the loss of one step
            self.start(loss)
        assert self._life is not None
        self._keep_buffers()  # the rank's own forwards may have replaced buffers, too
        self._life.send(message)
        answer: Computed | _Failed = pickle.loads(self._life.receive())
        if isinstance(answer, _Failed):
            self.close()
            if answer.mistake is not None:
                raise UserError(answer.mistake)
            raise ProcessDiedError(f"its step raised\n{answer.reason.rstrip()}\n")
        self.seconds += answer.seconds
        gradients = {name: gradient if name in answer.used else None for name, gradient in self._gradients.items()}
        return torch.tensor(answer.totals, dtype=torch.float64), gradients

    def close(self) -> None:
        """End the process, if there is one; it holds nothing that would be lost."""
        life, self._life = self._life, None
        if life is not None:
            life.kill()

    def _share_buffers(self) -> None:
        """Move the model's buffers into shared memory, also those that forwards have replaced."""
        for name, buffer in self._model.named_buffers():
            if not _same_memory(self._buffers.get(name), buffer):
                buffer.data = self._buffers[name] = _shared_copy(buffer)

    def _keep_buffers(self) -> None:
        """Copy buffers that a forward has replaced by new tensors back into shared memory."""
        for name, buffer in self._model.named_buffers():
            shared = self._buffers.get(name)
            if shared is None or _same_memory(shared, buffer):
                continue
            # A buffer of another shape is a cache for the size of the inputs, and no state of the training.
            if shared.shape == buffer.shape and shared.dtype == buffer.dtype:
                buffer.data = shared.copy_(buffer.detach())

    def _serve(self, life: _Life) -> None:
        """Main loop of the process: compute batches until the rank closes the connection or ends."""
        life.connection.close()
        _leave_the_rank(life.other_end)
        life.other_end.send_bytes(_READY)
        with suppress(EOFError, ConnectionError):
            while True:
                batch = pickle.loads(life.other_end.recv_bytes())
                answer = self._answer(batch, life.loss)
                for stream in (sys.stdout, sys.stderr):
                    stream.flush()
                life.other_end.send_bytes(pickle.dumps(answer))

    def _answer(self, batch: StepBatch, loss: TaskLoss) -> Computed | _Failed:
        began = time.thread_time()
        try:
            totals = self._backward(batch, loss)
            used = [name for name, parameter in self._parameters.items() if parameter.grad is not None]
            for name in used:
                gradient = self._parameters[name].grad
                assert gradient is not None
                self._gradients[name].copy_(gradient)
            self._keep_buffers()
        except UserError as error:
            return _Failed(reason="", mistake=str(error))
        except BaseException:  # whatever it is, the rank decides
            return _Failed(reason=traceback.format_exc())
        return Computed(totals=totals.tolist(), used=frozenset(used), seconds=time.thread_time() - began)


def _shared_copy(tensor: Tensor) -> Tensor:
    """Copy a tensor into shared memory."""
    copy = shared_empty(tensor.numel(), tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor.detach())


def _same_memory(one: Tensor | None, other: Tensor) -> bool:
    return one is not None and one.data_ptr() == other.data_ptr() and one.shape == other.shape


def _leave_the_rank(connection: Connection) -> None:
    """Release the rank's signals, sockets and memory in a forked process."""
    end_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM):  # the rank handles signals, and this process ends with it
        signal.signal(number, signal.SIG_IGN)
    _let_go_of_sockets(connection.fileno())
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(_OUT_OF_MEMORY_FIRST), encoding="ascii")
    gc.freeze()  # a collection would write to all pages, and so copy them


def _let_go_of_sockets(kept: int) -> None:
    """Close a forked process's copies of the rank's sockets, so that peers notice when the rank itself ends.

    Each descriptor is replaced by /dev/null, so that its number is not reused for another file, which the garbage
    collected owner of the socket would close.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in sockets():
        if number > _STDERR and number != kept:
            os.dup2(nothing, number, inheritable=False)
    os.close(nothing)
