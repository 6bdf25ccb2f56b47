"""The host memory of a checkpoint while it is written in the background: a copy of the saved state.

Invariant: as in `estimate`, the term depends only on the configuration and the models' config.json files.
"""

from collections.abc import Collection, Sequence

from polyreme_trainer.megatron.memory.state import MASTER_BYTES, MOMENTS_BYTES, WIDTHS, Addend, Model


def checkpoint_term(models: Sequence[Model], followers: Collection[str], export_dtype: str, nodes: int) -> Addend:
    """The copies of the ranks of the first machine, where data rank 0 saves the weights and rank 0 exports the models.

    Args:
        followers: the roles without an optimizer that a checkpoint contains.
        export_dtype: the dtype of the exported models.
        nodes: the number of machines, which divide the optimizer.
    """
    parts, total = list[str](), 0
    for model in models:
        if not model.trained and model.role not in followers:
            continue
        changed, exported = (model.adapter or model.arch).parameters, model.arch.parameters
        parts.append(f"{model.role} {changed:,} parameters x {model.width} bytes")
        total += changed * model.width
        if model.trained:
            optimizer = MOMENTS_BYTES + (MASTER_BYTES if model.width < MASTER_BYTES else 0)
            parts.append(f"its optimizer {changed:,} x {optimizer}" + (f" / {nodes} machines" if nodes > 1 else ""))
            total += -(-changed * optimizer // nodes)
        if model.role != "reference":
            parts.append(f"its export {exported:,} x {WIDTHS[export_dtype]}")
            total += exported * WIDTHS[export_dtype]
    return Addend("checkpoint", total, " + ".join(parts))
