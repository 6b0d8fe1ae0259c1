"""Whether a module's work may be done by its parent: the one place that is asked before a fused path runs."""

from __future__ import annotations

from torch import nn
from torch.nn.modules import module as _state


def is_own(module: nn.Module | None, *kinds: type[nn.Module]) -> bool:
    """Whether a module is exactly of one of these classes, and has no hooks.

    Then its parent may read its parameters, and need not call it. A subclass, a wrapper (LoRA, a quantised layer, FSDP)
    and a parametrized module are of another class: their parent calls them as it would call PyTorch's own module.

    >>> linear = nn.Linear(2, 2)
    >>> is_own(linear, nn.Linear), is_own(nn.utils.parametrizations.weight_norm(linear), nn.Linear)
    (True, False)
    """
    return type(module) in kinds and module is not None and has_no_hooks(module)


def has_no_hooks(module: nn.Module) -> bool:
    """Whether nobody sees or changes what goes in and comes out: no hook of the module or of all modules, no other
    `forward` put in its place, no compiled call.

    >>> linear = nn.Linear(2, 2)
    >>> handle = linear.register_forward_hook(lambda *_: None)
    >>> has_no_hooks(linear), handle.remove(), has_no_hooks(linear)
    (False, None, True)
    """
    hooks = (
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
        or _state._global_forward_hooks or _state._global_forward_pre_hooks
        or _state._global_backward_hooks or _state._global_backward_pre_hooks
    )  # fmt: skip
    return not hooks and "forward" not in module.__dict__ and module._compiled_call_impl is None
