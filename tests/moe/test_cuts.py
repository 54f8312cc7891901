"""Slices and chunks of all ranks at once, without processes: every row arrives once, where its expert is."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.moe.dispatch.chunking import ShardGather, SlicedRows, slice_sizes


@given(
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=9),
    num_slices=st.integers(1, 12),
)
def test_slices_are_nearly_equal_and_lose_nothing(counts: list[int], num_slices: int) -> None:
    sizes = slice_sizes(torch.tensor(counts), torch.arange(len(counts)), num_slices)
    assert sizes.sum(1).tolist() == counts
    assert sizes.min() >= 0
    assert (sizes.amax(1) - sizes.amin(1)).max() <= 1


def test_experts_with_few_rows_do_not_all_fill_the_same_slice() -> None:
    """One row for each of 8 experts, in 4 slices."""
    assert slice_sizes(torch.ones(8, dtype=torch.int64), torch.arange(8), 4).sum(0).tolist() == [2, 2, 2, 2]


Row = tuple[int, int, int]
"""Expert, source, position among the source's rows."""


@settings(max_examples=60)
@given(
    num_ranks=st.integers(1, 3),
    num_local=st.integers(1, 3),
    degrees=st.sampled_from([(1, 1), (2, 1), (2, 3), (4, 2), (6, 4)]),
    most=st.sampled_from([0, 1, 3, 20]),
    seed=st.integers(0, 99),
)
def test_chunks_of_every_degree_bring_the_same_slices(
    num_ranks: int, num_local: int, degrees: tuple[int, int], most: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, most + 1, (num_ranks, num_ranks * num_local), generator=generator)
    num_slices = int(torch.tensor(degrees[0]).lcm(torch.tensor(degrees[1])))
    rows: list[list[Row]] = []
    for source, of_experts in enumerate(counts.tolist()):
        experts = [expert for expert, count in enumerate(of_experts) for _ in range(count)]
        rows.append([(expert, source, position) for position, expert in enumerate(experts)])
    places = [counts[:, place * num_local : (place + 1) * num_local] for place in range(num_ranks)]
    experts = torch.arange(num_ranks * num_local)
    homes = [slice_sizes(counts[rank], experts, num_slices) for rank in range(num_ranks)]
    arriving = [
        slice_sizes(place, here, num_slices) for place, here in zip(places, experts.split(num_local), strict=True)
    ]
    table = torch.stack([home.view(num_ranks, num_local, -1).sum(1) for home in homes])
    cuts = [SlicedRows(homes[rank], arriving[rank], table, rank) for rank in range(num_ranks)]
    found = []
    for degree in degrees:
        chunks = [cut.chunks(degree) for cut in cuts]
        slices: list[list[list[Row]]] = [[] for _ in range(num_ranks)]
        for i in range(degree):
            homes_of = [chunks[rank][i].home for rank in range(num_ranks)]
            sent = [
                rows[rank] if home is None else [rows[rank][j] for j in home.tolist()]
                for rank, home in enumerate(homes_of)
            ]
            for rank in range(num_ranks):
                chunk, came = chunks[rank][i], []
                for source in range(num_ranks):
                    sizes = chunks[source][i].sent
                    assert chunk.received[source] == sizes[rank]
                    assert chunk.table[source] == sizes
                    came += sent[source][sum(sizes[:rank]) : sum(sizes[: rank + 1])]
                ordered = [came[j] for j in chunk.index.tolist()]
                assert [ordered[j] for j in chunk.inverse.tolist()] == came
                of_slices = cuts[rank].counts().split(num_slices // degree)[i]
                for size, of_experts in zip(chunk.sizes, of_slices, strict=True):
                    one, ordered = ordered[:size], ordered[size:]
                    assert one == sorted(one)
                    numbers = [expert - rank * num_local for expert, _, _ in one]
                    assert [numbers.count(expert) for expert in range(num_local)] == of_experts.tolist()
                    slices[rank].append(one)
        for rank in range(num_ranks):
            here = sorted(row for one in slices[rank] for row in one)
            assert here == sorted(row for some in rows for row in some if row[0] // num_local == rank)
        found.append(slices)
    assert found[0] == found[1]


def test_sharers_put_their_rows_together_by_slice_and_expert() -> None:
    """Two sharers, two slices, two experts; padded to the three rows that the second has in the first chunk."""
    table = torch.tensor([[[1, 0], [1, 1]], [[2, 1], [0, 0]]])
    first, second = ShardGather.of(table, 2)
    assert (first.most, first.sizes) == (3, [4])
    assert first.index.tolist() == [0, 3, 4, 5]
    assert (second.most, second.index.tolist(), second.sizes) == (2, [0, 1], [2])
    (whole,) = ShardGather.of(table, 1)
    assert (whole.most, whole.sizes) == (3, [4, 2])
    # (slice, expert, sharer): first sharer's rows are 0, 1, 2, the second's begin at 3.
    assert whole.index.tolist() == [0, 3, 4, 5, 1, 2]
