"""Member: base class of servers and workers, with a copy of the model for evaluations, and checkpoints."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.engines.native.trainer import NativeTrainer
from samestep.engines.parameter_server.messages import PointToPoint
from samestep.engines.parameter_server.settings import ParameterServerSettings, Roles
from samestep.engines.parameter_server.shards import Chunk, FlatParameters
from samestep.engines.setup import TrainerSetup
from samestep.errors import UserError
from samestep.parallel.sharding import Entry
from samestep.parallel.state_shards import MODEL, OPTIMIZER, Piece, innermost, model_pieces, whole_piece


@dataclass(frozen=True, kw_only=True)
class ServerSetup:
    """The setup that all servers and workers share."""

    flat: FlatParameters  # the model's parameters in one tensor, in which each server has a range
    roles: Roles
    settings: ParameterServerSettings
    wire: PointToPoint


class ParameterServerMember(NativeTrainer):
    """A rank of a parameter server. All ranks evaluate, with the parameters that the servers then hold."""

    def __init__(self, setup: TrainerSetup, shared: ServerSetup) -> None:
        super().__init__(setup)
        check_optimizer(self.optimizer)
        self.flat = shared.flat
        self.roles = shared.roles
        self.settings = shared.settings
        self.wire = shared.wire
        self.free_running = not shared.settings.synchronous
        self._changed = False  # whether parameters have changed since the last refresh

    def refresh(self) -> None:
        """Broadcast the servers' parameters and the first worker's buffers to every rank; every rank must ask."""
        if not self._changed:
            return
        for number, server in enumerate(self.roles.servers):
            dist.broadcast(self.flat.shard(number), src=server)
        own_state = self.model.state_dict()
        for name in self._spread.parts.buffers():
            value = own_state[name].contiguous()
            dist.broadcast(value, src=self.roles.workers[0])
            own_state[name].copy_(value)
        self._changed = False

    def predict(self, inputs: Any) -> Any:
        self.refresh()
        return super().predict(inputs)

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        self.refresh()
        return super().parameters()

    def optimizer_state(self, keys: Sequence[str]) -> Iterator[tuple[str, str, Tensor]]:
        """Gather the servers' chunks of the optimizer state on every rank; every rank must ask."""
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, list(self._held_state(keys)))
        spans = {span.name: span for span in self.flat.spans}
        whole: dict[tuple[str, str], Tensor] = {}
        for name, key, first, values in (piece for held in everyone for piece in held):
            state = whole.setdefault((name, key), torch.zeros(spans[name].shape, dtype=values.dtype))
            state.view(-1)[first : first + values.numel()] = values
        for (name, key), state in whole.items():
            yield name, key, state

    def _held_state(self, keys: Sequence[str]) -> Iterator[tuple[str, str, int, Tensor]]:
        """Parameter, key, the first element and the values of this server's chunks, in one dimension."""
        for parameter, chunk in self.held_chunks().items():
            state = self.optimizer.state.get(parameter, {})
            for key in keys:
                if isinstance(value := state.get(key), Tensor) and value.shape == chunk.shape:
                    yield chunk.span.name, key, chunk.first, value.detach().cpu().reshape(-1)

    def _whole_state(self, *, kept: bool) -> dict[str, Tensor]:
        self.refresh()
        return super()._whole_state(kept=kept)

    def pieces(self) -> dict[str, Piece]:
        """Pieces for a checkpoint: on a server its shard, on the first worker buffers and frozen parameters."""
        if dist.get_rank() != self.roles.workers[0]:
            return {}
        served = {MODEL + span.name for span in self.flat.spans}
        every = model_pieces(self.model, self._spread.parts)
        return {name: piece for name, piece in every.items() if name not in served}

    def restore(
        self,
        step: int,
        saved: Mapping[str, Entry],
        read: Callable[[Mapping[str, Piece]], None],
        scaler: Mapping[str, float],
    ) -> None:
        # Every rank reads the whole model into its copy, of which a server's shard is a part.
        to_fill = ShardState(self.optimizer, self.held_chunks(), saved)
        read({**model_pieces(self.model, self._spread.parts), **to_fill.pieces})
        to_fill.fill()
        self._changed = False
        self._advance_schedule(step)

    def held_chunks(self) -> Mapping[nn.Parameter, Chunk]:
        """The chunks that this rank's optimizer steps."""
        return {}


class ShardState:
    """Loads the state of an optimizer of chunks from a checkpoint: read into `pieces`, then `fill`."""

    def __init__(
        self, optimizer: Optimizer, chunks: Mapping[nn.Parameter, Chunk], saved: Mapping[str, Entry]
    ) -> None:
        self._optimizer = optimizer
        self._chunks = chunks
        self._state: dict[nn.Parameter, dict[str, Tensor]] = {}
        self.pieces: dict[str, Piece] = {}
        for parameter, chunk in chunks.items():
            prefix = f"{OPTIMIZER}{chunk.span.name}."
            for full_name in (name for name in saved if name.startswith(prefix)):
                key, entry = full_name.removeprefix(prefix), saved[full_name]
                if "." in key:  # of a parameter whose name begins with this one's
                    continue
                shaped = entry.shape == chunk.span.shape and len(entry.shape)
                value = torch.zeros(chunk.shape if shaped else entry.shape, dtype=entry.dtype)
                value = value.to(parameter.device) if shaped else value
                self._state.setdefault(parameter, {})[key] = value
                self.pieces[full_name] = piece_of_state(chunk, value)

    def fill(self) -> None:
        """Give the optimizer what was read, and leave its groups' settings as they are."""
        if not self._chunks:
            return
        self._optimizer.state.clear()
        for parameter, values in self._state.items():
            self._optimizer.state[parameter] = values


def piece_of_state(chunk: Chunk, value: Tensor) -> Piece:
    """State of a chunk's shape is cut as the chunk is; other state is each server's, such as a count of steps."""
    return chunk.piece(value) if value.ndim and value.shape == chunk.shape else whole_piece(value)


# Their update of an element needs that element's gradient and state alone, so a part of a tensor can be stepped.
_ELEMENTWISE: Sequence[type[Optimizer]] = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)


def check_optimizer(optimizer: Optimizer) -> None:
    """Raise UserError for an optimizer that may look at whole tensors, of which a server has parts."""
    for inner in innermost(optimizer):
        if type(inner) not in _ELEMENTWISE:
            kinds = ", ".join(kind.__name__ for kind in _ELEMENTWISE)
            raise UserError(
                f'engine "parameter-server": servers step parts of tensors, which {type(inner).__name__} is not '
                f"known to allow; use one of {kinds}"
            )
