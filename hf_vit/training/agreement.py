"""What the processes of a training learn of each other after every step."""

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp, all_reduce
from torch.distributed.tensor import DTensor


class Agreement:
    """Lets all processes know the largest of their numbers, so that they decide alike, and need not wait for a GPU.

    All processes make the same calls, with as many numbers.
    """

    def __init__(self, is_distributed: bool) -> None:
        """Begins; without other processes, a process agrees with itself."""
        self.is_distributed = is_distributed
        self._pending: tuple[Tensor, torch.cuda.Event] | None = None

    def largest(self, numbers: Tensor) -> Tensor:
        """Returns the largest of the numbers (K,) int64 of all processes, in their place."""
        if self.is_distributed:
            all_reduce(numbers, ReduceOp.MAX)
        return numbers

    def exchange(self, numbers: Tensor) -> list[int]:
        """Returns the largest numbers of all processes: on a CPU of this call, from a GPU of the call before.

        Those have arrived while the GPU worked on another step.

        Args:
            numbers: (K,) int64, which are written over.
        """
        numbers = self.largest(numbers)
        if numbers.device.type != "cuda":
            return numbers.tolist()
        earlier = self.settle() or [0] * len(numbers)
        event = torch.cuda.Event()
        self._pending = numbers.to("cpu", non_blocking=True), event
        event.record()
        return earlier

    def settle(self) -> list[int]:
        """Waits for what the last call has not returned yet, and returns it; nothing if there is nothing."""
        if self._pending is None:
            return []
        (numbers, event), self._pending = self._pending, None
        event.synchronize()
        return numbers.tolist()


def lost_weights(model: nn.Module) -> Tensor:
    """Returns (1,) int64 on the model's device, which is 1 if a weight is infinite or NaN, here 0.

    Of a sharded model it looks at the shard of this process.
    """
    weights = [parameter.detach() for parameter in model.parameters()]
    shards = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in weights]
    return 1 - torch.stack([shard.isfinite().all() for shard in shards]).all().long()[None]
