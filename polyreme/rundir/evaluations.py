"""The result of an evaluation, and which results can be compared. Pure."""

from polyreme.experience.metric_records import Evaluation


def evaluation_of(record: Evaluation) -> tuple[str, float]:
    """The name and value of an evaluation's deciding result: that of `eval_best` if it is set, otherwise `accuracy` when every
    answer is right or wrong, or the mean `score`."""
    if result := record.result:
        return str(result["metric"]), float(result["value"])
    name = "accuracy" if "accuracy" in record.metrics else "score"
    return name, float(record.metrics[name])


def comparable(one: Evaluation, other: Evaluation) -> bool:
    """Whether the results of two evaluations have the same meaning: the same metric, on the same held-out prompts, answered
    alike. The mean of a set is called `score` once an answer is partly right. A record without `held_out` fits every other."""
    prompts = {record.held_out for record in (one, other) if record.held_out is not None}
    return len(prompts) <= 1 and _metric(one) == _metric(other)


def _metric(record: Evaluation) -> str:
    return _mean_as_score(evaluation_of(record)[0])


def _mean_as_score(metric: str) -> str:
    prefix, slash, last = metric.rpartition("/")
    is_reward = prefix.rpartition("/")[2] == "reward"  # it may also be called `accuracy`
    return f"{prefix}{slash}score" if last == "accuracy" and not is_reward else metric
