"""Has DDP reduce gradients once per step instead of after every micro-batch, without ``no_sync`` in the script.

DDP looks at ``require_backward_grad_sync`` in its forward alone, so that ``no_sync`` around the forward of every
micro-batch but the last is what is done here. Which one is the last is known from the recording: their number ``k`` was
always the same. Should it not be so in the end, nothing is lost::

    k = 3     F B  F B  F B+reduce  step      the rule
              F B  F B+reduce*      step      fewer: what was held back is reduced before the step, and that is the end
              F  F  B+reduce        step      two forwards to one backward: reduced as the script has it from there on

A reduction after some that were held back takes their gradients along: DDP averages what has accumulated. ``*``: the
gradients are averaged here, which comes after a clipping of gradients, so the trial is marked as of no use.
"""

from __future__ import annotations

import functools
from typing import Any, Final

from perfscope.collectors.overrides.log import Log
from perfscope.collectors.patches import Patches

SETTING: Final = "ddp.no_sync"


def withhold_gradients(module: Any, microbatches: int, patches: Patches, log: Log) -> None:
    """Hold the gradients of all but the last of ``microbatches`` back. Raises ValueError where that would be wrong."""
    if microbatches < 2:
        raise ValueError("there are no micro-batches: one backward per step")
    if module.find_unused_parameters or module.static_graph:
        raise ValueError("find_unused_parameters and static_graph cannot be combined with no_sync")
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    held = HeldBack(module, microbatches, log)
    module.register_forward_pre_hook(held.before_forward)
    module.register_forward_hook(held.after_forward)
    register_optimizer_step_pre_hook(held.before_step)
    _count_backwards(held, patches)
    log.replaced(SETTING, old=False, new=True)


class HeldBack:
    """The micro-batches of one DDP."""

    def __init__(self, module: Any, microbatches: int, log: Log) -> None:
        self._module = module
        self._parameters = {id(parameter) for parameter in module.parameters()}
        self._microbatches = microbatches
        self._log = log
        self._off = False
        self._holding = False
        """Is the gradient of the last forward held back?"""
        self._forwards = 0
        self._backwards = 0

    def before_forward(self, module: Any, _inputs: Any) -> None:
        """A micro-batch begins: is it one to hold back?"""
        import torch

        if self._off or not torch.is_grad_enabled():
            return
        against = self._against(module)
        if against:
            self._stop(against)
        self._holding = not against and self._forwards < self._microbatches - 1
        self._forwards += 1
        if self._holding:
            module.require_backward_grad_sync = False

    def after_forward(self, module: Any, _inputs: Any, _output: Any) -> None:
        """DDP has looked."""
        if self._holding:
            module.require_backward_grad_sync = True

    def after_backward(self) -> None:
        """A backward has ended."""
        self._backwards += 1

    def before_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        """An optimizer steps: gradients that are still held back must not go into it as they are."""
        if self._off or not self._trains(optimizer):
            return
        if self._holding:
            self._reduce()
            self._stop("the number of micro-batches is not the same in every step")
        self._holding = False
        self._forwards = self._backwards = 0

    def _against(self, module: Any) -> str:
        """Why nothing may be held back any more; empty where nothing speaks against it."""
        if not module.require_backward_grad_sync:
            return "the script already uses no_sync"
        if self._forwards != self._backwards:
            return "the script calls the model several times before it calls backward"
        return ""

    def _trains(self, optimizer: Any) -> bool:
        return any(id(each) in self._parameters for group in optimizer.param_groups for each in group["params"])

    def _reduce(self) -> None:
        import torch.distributed as dist

        group = self._module.process_group
        for parameter in self._module.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(dist.get_world_size(group))
                dist.all_reduce(parameter.grad, group=group)

    def _stop(self, reason: str) -> None:
        self._off = True
        self._log.refused(SETTING, reason)


def _count_backwards(held: HeldBack, patches: Patches) -> None:
    import torch.autograd

    original = torch.autograd.backward

    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        held.after_backward()
        return result

    patches.set(torch.autograd, "backward", backward)
