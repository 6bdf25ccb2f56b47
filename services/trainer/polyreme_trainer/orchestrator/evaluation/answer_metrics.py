"""Metrics of an evaluation with several answers to each prompt.

Invariant: pure. A metric over fewer answers than there are is its expectation over the choice of answers, not one choice's value.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence

from polyreme.config.evaluation import pass_sizes


def pass_at(answers: int, right: int, k: int) -> float:
    """Probability that at least one of k answers, drawn from `answers` of which `right` are right, is right (k <= answers).

    The unbiased estimator of Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1.
    """
    return 1.0 - math.comb(answers - right, k) / math.comb(answers, k)


def answer_metrics(
    scores: Sequence[Sequence[float]], texts: Sequence[Sequence[str]], correctness: bool, pattern: str | None
) -> dict[str, float]:
    """The metrics over n answers to each prompt; {} for n = 1, where the mean is sufficient.

    `mean@n` is the mean score, `best@n` the mean of each prompt's best score, `majority@n` the mean score of each prompt's most
    frequent answer. `pass@k` for k = 1, 2, 4, ... and n exists if scores are 1 for a right and 0 for a wrong answer.

    Args:
        scores: n numbers for each prompt.
        texts: n responses to each prompt.
        correctness: whether a score is 1 for a right and 0 for a wrong answer.
        pattern: as in `answer_of`.
    """
    prompts, n = len(scores), len(scores[0]) if scores else 0
    if n < 2:
        return {}
    found = {
        f"mean@{n}": math.fsum(map(math.fsum, scores)) / (n * prompts),
        f"best@{n}": math.fsum(map(max, scores)) / prompts,
        f"majority@{n}": math.fsum(majority(*each, pattern) for each in zip(scores, texts, strict=True)) / prompts,
    }
    if correctness:
        right = [sum(score == 1.0 for score in each) for each in scores]
        found |= {f"pass@{k}": math.fsum(pass_at(n, count, k) for count in right) / prompts for k in pass_sizes(n)}
    return found


def majority(scores: Sequence[float], texts: Sequence[str], pattern: str | None) -> float:
    """The score of the most frequent answer. Of equally frequent ones, the first counts. A response without an answer has
    no vote, unless no response has an answer."""
    answers = [answer_of(text, pattern) for text in texts]
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return math.fsum(scores) / len(scores)
    [(winner, _)] = votes.most_common(1)
    return scores[answers.index(winner)]


def answer_of(text: str, pattern: str | None) -> str | None:
    """The answer in a response: the first group (or the whole) of the last match of a regular expression; None without a match.

    Args:
        text: the response.
        pattern: the regular expression, or None: the whole response, without white space at its ends.
    """
    if pattern is None:
        return text.strip()
    matches = list(re.finditer(pattern, text))
    if not matches:
        return None
    last = matches[-1]
    return str(last.group(1) if last.re.groups else last.group()).strip()
