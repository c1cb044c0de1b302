"""Random numbers inside sliced layers: a rank's own, while the stream that the ranks share stays in step."""

import torch


class OwnRandomness:
    """Between `begin` and `end` a rank draws from a stream of its own: masks of heads and features that it alone has.

    The seed of that stream is drawn from the shared one, so that a block which is computed again in backward, with
    the state of the shared stream put back, draws the same.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank = rank
        self._device = device
        self._shared: torch.Tensor | None = None

    def begin(self) -> None:
        seed = int(torch.randint(2**48, ()))
        generator = _generator(self._device)
        self._shared = generator.get_state()
        generator.manual_seed(seed * 4099 + self._rank)

    def end(self) -> None:
        if self._shared is not None:
            _generator(self._device).set_state(self._shared)
            self._shared = None


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    return module.default_generators[device.index if device.index is not None else module.current_device()]
