"""What sees every operation that torch does, without torch's compiler."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Dispatch"]


class Dispatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Torch's mode, to be derived from: its wrapper round every call would import the compiler, seconds of a start."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled here, so nothing must keep the compiler out. Where torch does not ask, nobody calls this.
        return False
