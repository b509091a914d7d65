"""The block pool: accounting, sharing, eviction."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laya.engine.blocks import BlockPool
from laya.engine.sequence import Sequence
from laya.engine.tiles import Tiles
from laya.schema.generation import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
_ids = iter(range(10**9))


def sequence(tokens: list[int]) -> Sequence:
    return Sequence(next(_ids), tokens, GREEDY)


def computed(pool: BlockPool, tokens: list[int], salt: str = "") -> Sequence:
    made = sequence(tokens)
    assert pool.start(made, salt)
    made.num_computed = len(tokens)
    pool.register(made)
    return made


def test_a_sequence_takes_the_blocks_its_tokens_need_and_gives_all_back():
    pool = BlockPool(8, 4)
    one = sequence(list(range(9)))
    assert pool.start(one, "")
    assert len(one.block_table) == 3 and pool.used == 3
    assert pool.grow(one, 12) and len(one.block_table) == 3
    assert pool.grow(one, 13) and len(one.block_table) == 4
    pool.release(one)
    pool.check([one])
    assert pool.used == 0 and one.block_table == []


def test_nothing_is_taken_when_blocks_are_short():
    pool = BlockPool(3, 4)
    one = computed(pool, list(range(8)))
    two = sequence(list(range(100, 109)))
    assert not pool.start(two, "")
    assert two.block_table == [] and pool.used == 2
    assert not pool.grow(one, 17) and pool.used == 2
    pool.check([one, two])


def test_a_known_prefix_is_shared_and_a_whole_prompt_leaves_its_last_block_to_recompute():
    """(case 46)"""
    pool = BlockPool(16, 4)
    first = computed(pool, list(range(8)))
    second = sequence(list(range(8)))
    assert pool.start(second, "")
    assert second.num_computed == 4 and second.block_table[0] == first.block_table[0]
    assert second.block_table[1] != first.block_table[1]
    longer = sequence(list(range(11)))
    assert pool.start(longer, "")
    assert longer.num_computed == 8 and longer.block_table[:2] == first.block_table
    pool.check([first, second, longer])


def test_tenants_with_different_salts_share_nothing():
    """(case 47)"""
    pool = BlockPool(16, 4)
    computed(pool, list(range(8)), salt="a")
    assert pool.match(list(range(9)), "a") and not pool.match(list(range(9)), "b") and not pool.match(list(range(9)), "")


def test_equal_tokens_behind_a_different_parent_do_not_match():
    pool = BlockPool(16, 4)
    computed(pool, [1, 1, 1, 1, 7, 7, 7, 7])
    assert pool.match([2, 2, 2, 2, 7, 7, 7, 7, 0], "") == []
    assert pool.match([7, 7, 7, 7, 0], "") == []


def test_a_block_that_is_not_computed_is_not_cached():
    pool = BlockPool(16, 4)
    one = sequence(list(range(9)))
    pool.start(one, "")
    one.num_computed = 7
    pool.register(one)
    assert len(pool.match(list(range(9)), "")) == 1


def test_eviction_takes_the_least_recently_used_and_leaves_before_parents():
    pool = BlockPool(4, 4)
    old = computed(pool, [1] * 4 + [2] * 4)
    new = computed(pool, [3] * 4 + [4] * 4)
    pool.release(old)
    pool.release(new)
    taker = sequence([9] * 4)
    pool.start(taker, "")
    assert len(pool.match([1] * 4 + [2] * 4 + [0], "")) == 1  # the leaf of the older went
    assert len(pool.match([3] * 4 + [4] * 4 + [0], "")) == 2
    pool.check([old, new, taker])


def test_a_child_whose_parent_was_evicted_and_computed_again_is_never_taken_for_anothers():
    pool = BlockPool(4, 2)
    first, twin = sequence([1, 1, 5, 5]), sequence([1, 1, 6, 6])
    assert pool.start(first, "") and pool.start(twin, "")
    for one in (first, twin):  # both compute the same first block at the same time: one of the two is cached
        one.num_computed = 4
        pool.register(one)
    assert len(pool.match([1, 1, 6, 6, 0], "")) == 2
    pool.release(first)
    computed(pool, [7, 7])  # evicts first's tail
    fresh = computed(pool, [8, 8])  # evicts the common block and takes its place; its child by `twin` lives on
    assert len(pool.match([8, 8, 6, 6, 0], "")) == 1
    assert pool.match([1, 1, 6, 6, 0], "") == []
    pool.release(fresh)
    again = computed(pool, [1, 1])
    assert len(pool.match([1, 1, 6, 6, 0], "")) == 1
    assert again.block_table != twin.block_table[:1]


def test_check_finds_a_lost_reference():
    pool = BlockPool(4, 4)
    one = computed(pool, list(range(8)))
    one.block_table.pop()
    with pytest.raises(AssertionError, match="references counted"):
        pool.check([one])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("snrg"), st.integers(0, 9), st.integers(1, 22)), max_size=60), st.integers(3, 14))
def test_the_invariants_hold_over_any_history(operations, num_blocks):
    pool = BlockPool(num_blocks, 3)
    live: list[Sequence] = []
    for kind, pick, length in operations:
        if kind in "sn" or not live:
            # Two alphabets of one letter each: prefixes of different lengths are shared often.
            one = sequence([pick % 2] * length if kind == "s" else [pick % 2, pick] + [0] * length)
            if pool.start(one, "t" * (pick % 2)):
                live.append(one)
        elif kind == "r":
            pool.release(live.pop(pick % len(live)))
        else:
            one = live[pick % len(live)]
            one.num_computed = len(one)
            pool.register(one)
            one.token_ids.append(pick)
            if not pool.grow(one, len(one)):
                one.token_ids.pop()
        pool.check(live)
    for one in live:
        pool.release(one)
    pool.check([])
    assert pool.used == 0


def test_a_sequence_grows_into_its_neighbour_where_that_is_free():
    """Blocks side by side spare a lone decode the gathering of its keys."""
    pool = BlockPool(16, 4)
    one, other = computed(pool, list(range(8))), sequence(list(range(100, 104)))
    assert pool.start(other, "") and (one.block_table, other.block_table) == ([0, 1], [2])
    assert pool.grow(one, 20) and one.block_table == [0, 1, 3, 4, 5]
    assert pool.grow(other, 8) and other.block_table == [2, 6]
    pool.release(one)
    assert pool.grow(other, 12) and other.block_table == [2, 6, 7]
    again = sequence(list(range(200, 212)))
    assert pool.start(again, "") and again.block_table == [3, 4, 5]
    pool.check([other, again])


def test_evicted_blocks_are_handed_out_in_ascending_order():
    pool = BlockPool(6, 4)
    pool.release(computed(pool, list(range(24))))
    again = sequence(list(range(100, 120)))
    assert pool.start(again, "") and again.block_table == [1, 2, 3, 4, 5]
    pool.check([again])


def tiled(seq_id: int, length: int, prompt_tokens: int) -> Sequence:
    """A sequence of the same tokens as any other, the first `prompt_tokens` its prompt, cut in tiles of 8."""
    made = Sequence(seq_id, list(range(length)), SamplingParams(seed=1))
    made.tiles = Tiles(8, prompt_tokens)
    return made


def test_a_tiled_prompt_shares_whole_tiles_and_never_a_block_computed_otherwise():
    pool = BlockPool(64, 4)
    free, first = sequence(list(range(40))), tiled(1, 40, 30)
    for made in (free, first):
        assert pool.start(made, "") and made.num_computed == 0  # the second finds nothing of the first
        made.num_computed = 40
        pool.register(made)
    assert pool.match(list(range(30)), "") == free.block_table[:7]
    # (tokens known, its prompt): the same prompt, a shorter one, a longer one; then answers of other prompts, and its own.
    for length, own, found in ((30, 30, 6), (21, 21, 4), (40, 40, 6), (30, 25, 6), (30, 20, 4), (40, 30, 9)):
        again = tiled(2, length, own)
        assert pool.start(again, "") and again.block_table[:found] == first.block_table[:found]
        assert again.num_computed == found * 4 and again.tiles.start(again.num_computed) == again.num_computed
        pool.check([free, first, again])
        pool.release(again)
