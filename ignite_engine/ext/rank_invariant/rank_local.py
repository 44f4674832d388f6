"""What in a model belongs to one rank, or to some ranks together, and so cannot be the same on any number of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from ignite_engine.ranks import agreement, mesh
from ignite_engine.rng import is_generator


def check_model(model: nn.Module, parameters: Sequence[Tensor] = (), loss_fn: Any = None) -> None:
    """Refuse what keeps rank-local state or reduces by itself.

    Args:
        model: in the mode in which it will be trained.
        parameters: further ones that are trained.
        loss_fn: which may draw random numbers, too.

    Raises:
        ValueError: it does, and how to change it.
    """
    for reason in _reasons(model, parameters, loss_fn):
        raise ValueError(f"rank_invariant cannot give the same bits on any number of ranks: {reason}.")


def _reasons(model: Any, parameters: Sequence[Tensor], loss_fn: Any) -> Iterator[str]:
    kind = type(model).__name__
    if mesh.data_size() != agreement.world_size():
        yield "ranks that share their data (tensor parallel) sum within one micro-batch; declare no such mesh"
    if any(hasattr(parameter, "device_mesh") for parameter in (*model.parameters(), *parameters)):
        yield "parameters are sharded (DTensor: FSDP2 or tensor parallel); give Update the plain model"
    if isinstance(getattr(model, "_orig_mod", None), DistributedDataParallel):
        yield "the compiled model is a DistributedDataParallel; compile the plain model"
    if hasattr(model, "no_sync") or isinstance(model, nn.DataParallel):
        yield f"a {kind} reduces gradients by itself; give Update the plain model"
    for name, module in model.named_modules():
        described = f"{name or 'the model'} is a {type(module).__name__}"
        if isinstance(module, nn.SyncBatchNorm):
            yield f"{described}, whose statistics are those of all ranks; use GroupNorm or LayerNorm"
        if isinstance(module, _NormBase) and module.training and module.running_mean is not None:
            yield (
                f"{described} that trains, whose running statistics are each rank's own; use GroupNorm or LayerNorm, "
                "track_running_stats=False, or keep it in eval mode in the model's train()"
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            yield f"{described} with sparse gradients; use sparse=False"
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            yield f"{described} with max_norm, which rescales the rows that this rank looks up; use max_norm=None"
    for path, owner in (*model.named_modules(), ("the loss function", loss_fn)):
        for name, value in getattr(owner, "__dict__", {}).items():
            if is_generator(value):
                yield (
                    f"{path or 'the model'} ({type(owner).__name__}) has a generator of its own ({name}), which goes "
                    "on with each micro-batch of this rank; draw from torch's global generator, which belongs to the "
                    "micro-batch"
                )
