"""vLLM's engine delivers the tokens of a sample in chunks. vLLM itself delivers each token alone, and the replica's process then spends
more time to receive tokens than on all else.

Invariant: the chunks of a request are its tokens and their log-probabilities, all and in order. Each has the results of CHUNK_TOKENS
steps; the last one ends with the request. An aborted request leaves nothing behind.
"""

from typing import TYPE_CHECKING

import numpy as np

from polyreme_rollout.engine.protocol import CHUNK_TOKENS

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.request import Request

IN_CHUNKS = {"polyreme_in_chunks": True}
"""Extra arguments of a request, by which it asks for chunks."""


class OutputChunks:
    """Mixed into vLLM's Scheduler."""

    requests: "dict[str, Request]"

    def __init__(self, **arguments: object) -> None:
        super().__init__(**arguments)
        self.polyreme_held: dict[str, list[EngineCoreOutput]] = {}  # request id -> its outputs, one per step

    def update_from_output(self, *arguments: object, **options: object) -> "dict[int, EngineCoreOutputs]":
        by_client: dict[int, EngineCoreOutputs] = super().update_from_output(*arguments, **options)  # type: ignore[misc]
        for client, sent in list(by_client.items()):
            sent.outputs = [output for each in sent.outputs if (output := self._polyreme_hold(each)) is not None]
            if not (sent.outputs or sent.finished_requests or sent.scheduler_stats):
                del by_client[client]
        return by_client

    def finish_requests(self, *arguments: object, **options: object) -> object:
        aborted = super().finish_requests(*arguments, **options)  # type: ignore[misc]
        for id in self.polyreme_held.keys() - self.requests.keys():
            del self.polyreme_held[id]
        return aborted

    def _polyreme_hold(self, output: "EngineCoreOutput") -> "EngineCoreOutput | None":
        """Returns what to deliver now: the output, or a chunk that ends with it."""
        id, ended = output.request_id, output.finish_reason is not None
        held = self.polyreme_held.get(id)
        if held is None:
            if ended or not _in_chunks(self.requests[id]):
                return output
            held = self.polyreme_held[id] = []
        held.append(output)
        if len(held) < CHUNK_TOKENS and not ended:
            return None
        del self.polyreme_held[id]
        return _joined(held)


def _in_chunks(request: "Request") -> bool:
    params = request.sampling_params
    return params is not None and IN_CHUNKS.items() <= (params.extra_args or {}).items()


def _joined(outputs: "list[EngineCoreOutput]") -> "EngineCoreOutput":
    """The last output, with the tokens of all. What else the others carry is for vLLM's statistics, which are off."""
    last = outputs[-1]
    last.new_token_ids = [id for output in outputs for id in output.new_token_ids]
    rows = [output.new_logprobs for output in outputs if output.new_logprobs is not None]
    if rows:
        ids, logprobs, ranks = (np.concatenate(column) for column in list(zip(*rows, strict=True))[:3])
        last.new_logprobs = rows[0]._replace(logprob_token_ids=ids, logprobs=logprobs, sampled_token_ranks=ranks)
    return last
