"""The host memory of a checkpoint while it is written in the background: a copy of the saved state.

Invariant: as in `estimate`, the terms depend only on the configuration and the models' config.json files.
"""

from collections.abc import Collection, Sequence

from polyreme.config.trainer import ParallelConfig
from polyreme_trainer.memory.machines import written_parameters
from polyreme_trainer.memory.state import MASTER_BYTES, MOMENTS_BYTES, WIDTHS, Addend, Model


def checkpoint_terms(
    models: Sequence[Model], followers: Collection[str], export_dtype: str, parallel: ParallelConfig
) -> list[Addend]:
    """The copies of the ranks of each machine. The ranks that write a model's tensors save them, and rank 0 exports the models.

    The machines divide the optimizer: each has the optimizer of its stages or, if all have the same stage, an equal share.

    Args:
        followers: the roles without an optimizer that a checkpoint contains.
        export_dtype: the dtype of the exported models.

    Raises:
        ValueError: the sizes do not divide over the ranks.
    """
    saved = [model for model in models if model.trained or model.role in followers]
    written = [written_parameters(model.adapter or model.arch, parallel) for model in saved]
    return [
        _machine_term(saved, [counts[machine] for counts in written], export_dtype if machine == 0 else None, parallel)
        for machine in range(parallel.nodes)
    ]


def _machine_term(saved: Sequence[Model], written: Sequence[int], export_dtype: str | None, parallel: ParallelConfig) -> Addend:
    parts, total = list[str](), 0
    for model, count in zip(saved, written, strict=True):
        if count:
            parts.append(f"{model.role} {count:,} parameters x {model.width} bytes")
            total += count * model.width
        if model.trained:
            optimizer = MOMENTS_BYTES + (MASTER_BYTES if model.width < MASTER_BYTES else 0)
            changed = count if parallel.pipeline > 1 else (model.adapter or model.arch).parameters
            machines = 1 if parallel.pipeline > 1 else parallel.nodes
            parts.append(
                f"{model.role} optimizer {changed:,} x {optimizer}" + (f" / {machines} machines" if machines > 1 else "")
            )
            total += -(-changed * optimizer // machines)
        if export_dtype is not None and model.role != "reference":
            exported, width = model.arch.parameters, WIDTHS[export_dtype]
            parts.append(f"{model.role} export {exported:,} x {width}")
            total += exported * width
    return Addend("checkpoint", total, " + ".join(parts))
