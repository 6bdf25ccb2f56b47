"""Orchestrators share groups and capacity without rest."""

from hypothesis import given
from hypothesis import strategies as st

from polyreme.experience.shard import ONLY, Shard

counts = st.integers(1, 9)


@given(counts, st.integers(0, 50), st.integers(0, 50))
def test_each_group_has_one_orchestrator(count: int, start: int, more: int) -> None:
    shards = [Shard(number, count) for number in range(count)]
    among = [list(shard.among(start, start + more)) for shard in shards]
    assert sorted(index for indices in among for index in indices) == list(range(start, start + more))
    assert all(shard.owns(index) for shard, indices in zip(shards, among, strict=True) for index in indices)


@given(counts, st.integers(0, 500))
def test_shares_add_up_and_none_is_without(count: int, more: int) -> None:
    capacity = count + more
    shares = [Shard(number, count).share(capacity) for number in range(count)]
    assert sum(shares) == capacity and max(shares) - min(shares) <= 1
    assert Shard(count - 1, count).share(0) == 1


def test_the_only_one_leads_and_has_all() -> None:
    assert ONLY.leads and ONLY.name == "orchestrator" and ONLY.share(7) == 7
    assert not Shard(2, 3).leads and Shard(2, 3).name == "orchestrator-2"
