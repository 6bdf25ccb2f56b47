"""The calls of episodes, and their messages.

Invariant: what a server says of tool calls is in bounds before it reaches a record.
"""

import grpc

from polyreme.api.v1 import environment_pb2, environment_pb2_grpc
from polyreme.experience.records import ToolCall
from polyreme.net.many_calls import ManyCalls, NumberedCall

_SHOWN_CHARS = 1 << 14
EpisodeCalls = ManyCalls[environment_pb2.RunRequest, environment_pb2.RunResponse]
EpisodeCall = NumberedCall[environment_pb2.RunRequest, environment_pb2.RunResponse]


def episode_calls(channel: grpc.aio.Channel) -> EpisodeCalls:
    """The episodes on the environment server at the other end of a channel."""
    return ManyCalls(channel, environment_pb2_grpc.EnvironmentServiceStub(channel).RunMany, environment_pb2.RunManyRequest)


def read_calls(message: environment_pb2.Ask | environment_pb2.Ending | environment_pb2.SessionExchange) -> list[ToolCall]:
    """The tool calls of a message."""
    return [
        ToolCall(call.name, call.arguments, call.result[:_SHOWN_CHARS], max(0.0, call.seconds), call.error)
        for call in message.calls
    ]
