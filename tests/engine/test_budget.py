"""The memory plan: the three shapes of the design, its edges, and what it suggests."""

from __future__ import annotations

import msgspec
import pytest

from laya.engine.budget import ModelShape, PlanSettings, Shared, plan, shape_of
from laya.engine.machine import Memory

GIB = 1 << 30


def shape(layers, hidden, intermediate, heads, *, kv_heads=8, head_dim=128, vocab=151936, bits4=True, **more) -> ModelShape:
    """4-bit linears in groups of 128 with bf16 scale and zero (or bf16), bf16 embedding and head."""
    linears = layers * (
        2 * hidden * heads * head_dim + 2 * hidden * kv_heads * head_dim + 3 * hidden * intermediate
    )  # fmt: skip
    tables, norms = 2 * vocab * hidden * 2, (2 * layers + 1) * hidden * 4
    held = linears // 2 + linears // 128 * 4 if bits4 else linears * 2
    return ModelShape(
        layers=layers, hidden=hidden, intermediate=intermediate, heads=heads, kv_heads=kv_heads, head_dim=head_dim, vocab=vocab,
        context_length=32768, tensor_bytes=held + tables + norms, parameters=linears + 2 * vocab * hidden, **more,
    )  # fmt: skip


BIG = shape(64, 5120, 21504, 40)
MEDIUM = shape(32, 4096, 11008, 32)
CARD = PlanSettings(
    device="cuda", device_memory=Memory(12 * GIB, 12 * GIB), host_memory=Memory(32 * GIB, 24 * GIB), enforce_eager=True
)  # fmt: skip


def settings(**changes) -> PlanSettings:
    return msgspec.structs.replace(CARD, **changes)


def test_27b_in_4_bits_on_12_gib_is_refused_with_the_numbers():
    """(case 48)"""
    made = plan(BIG, settings(max_seq_len=4096, max_num_seqs=4))
    assert not made.fits and made.device["params"] > 15 * GIB and made.device_total > made.device_limit
    table = made.table()
    assert "does not fit" in table and f"{made.device_limit / (1 << 20):,.0f} MiB" in table and "params" in table
    assert "llama.cpp" in table


def test_27b_is_refused_at_small_settings_too_because_the_weights_alone_exceed_the_share():
    """(case 48)"""
    made = plan(BIG, settings(max_seq_len=2048, max_num_seqs=2, utilisation=0.75))
    assert not made.fits and made.device["params"] > made.device_limit == 9 * GIB


def test_7b_in_4_bits_is_accepted():
    made = plan(MEDIUM, settings(max_seq_len=2048, max_num_seqs=2, utilisation=0.75))
    assert made.fits and made.suggestions == ()
    assert made.num_blocks == 2 * 2048 // 16
    assert made.device["kv"] == 32 * 8 * 128 * 2 * 2 * 16 * (made.num_blocks + 2)


def test_every_later_allocation_is_in_the_plan():
    """(case 49)"""
    shared = Shared(connections=100, buffers=5, cache=6, sessions=7, store=8, backends=9)
    made = plan(MEDIUM, settings(max_seq_len=2048, max_num_seqs=2, swap_space=GIB, shared=shared))
    assert all(made.device[part] > 0 for part in ("params", "kv", "activation", "runtime"))
    assert made.device["activation"] > 64 * 151936 * 4  # logits
    assert made.host["swap"] == GIB and made.host["process"] > 0 < made.host["tokenizer"]
    assert [made.host[part] for part in ("buffers", "cache", "store", "backends")] == [5, 6, 8, 9]
    assert made.host["connections"] > 100 and made.host["sessions"] > 7 and made.host["queue"] > 0 < made.host["blocks"]


def test_what_a_matrix_needs_while_it_is_loaded_is_counted_where_it_lies():
    """(case 49) On a card the host holds it; on a CPU the pool and the temporaries are not there yet."""
    assert plan(MEDIUM, settings(max_seq_len=2048, max_num_seqs=2)).host["loading"] > 100 << 20
    memory = Memory(32 * GIB, 32 * GIB)
    on_cpu = settings(device="cpu", device_memory=memory, host_memory=memory, max_seq_len=16384, max_num_seqs=2)
    assert "packing" not in plan(MEDIUM, on_cpu).host


def test_what_a_prefill_chunk_unpacks_and_widens_on_a_cpu_is_counted():
    """(case 49) Panels of 4-bit weights in float32, their product, and a first chunk's attention."""
    memory = Memory(32 * GIB, 32 * GIB)
    sizes = {"max_seq_len": 2048, "max_num_seqs": 2, "prefill_chunk_tokens": 512}
    on_cpu = settings(device="cpu", device_memory=memory, host_memory=memory, **sizes)
    more = plan(MEDIUM, on_cpu).device["activation"] - plan(MEDIUM, settings(**sizes)).device["activation"]
    widest = max(MEDIUM.intermediate, MEDIUM.hidden)
    assert more >= 64 * widest * 4 + 512 * 64 * 4  # the smallest panel of the widest matrix, and what it gives
    wide = msgspec.structs.replace(MEDIUM, intermediate=64)  # attention decides
    narrow = msgspec.structs.replace(wide, heads=wide.heads // 2)
    saved = plan(wide, on_cpu).device["activation"] - plan(narrow, on_cpu).device["activation"]
    assert saved >= 512 * (wide.heads // 2) * wide.head_dim * (2 * (4 + 4) + 2)  # rotated and widened, in and out


def test_several_engines_split_one_limit_in_the_order_written():
    first = plan(MEDIUM, settings(max_seq_len=2048, max_num_seqs=2, utilisation=1.0))
    rest = settings(
        max_seq_len=2048, max_num_seqs=2, utilisation=1.0, shared=None,
        taken_device=first.device_total, taken_host=first.host_total,
    )  # fmt: skip
    second = plan(MEDIUM, rest)
    assert first.fits and second.host["process"] == 0  # one process, counted once
    assert second.device_limit == first.device_limit - first.device_total
    assert second.host_limit == first.host_limit - first.host_total
    assert second.fits is (second.device_total <= second.device_limit)
    assert not plan(MEDIUM, msgspec.structs.replace(rest, taken_device=8 * GIB)).fits


def test_on_a_cpu_nothing_takes_all_the_free_memory_unless_it_is_asked_for():
    """(case 50) A quarter of what is available goes to a pool that nobody gave a size."""
    memory = Memory(64 * GIB, 32 * GIB)
    on_cpu = settings(device="cpu", device_memory=memory, host_memory=memory, max_num_seqs=8)
    made = plan(MEDIUM, on_cpu)
    assert made.fits and made.device["kv"] <= 8 * GIB and made.device_limit <= 0.85 * 32 * GIB
    assert plan(MEDIUM, msgspec.structs.replace(on_cpu, kv_cache=12 * GIB)).device["kv"] > 11 * GIB


def test_without_a_window_the_largest_that_fits_is_planned():
    """(case 50)"""
    made = plan(MEDIUM, settings(max_num_seqs=1))
    assert made.fits and 4096 < made.max_seq_len < 32768
    assert not plan(MEDIUM, settings(max_num_seqs=1, max_seq_len=made.max_seq_len + 64)).fits
    whole = plan(msgspec.structs.replace(MEDIUM, context_length=2048), settings(max_num_seqs=1))
    assert whole.fits and whole.max_seq_len == 2048


def test_the_window_is_clamped_to_the_models():
    assert plan(msgspec.structs.replace(MEDIUM, context_length=1024), settings(max_seq_len=4096)).max_seq_len == 1024


def test_the_pool_is_what_is_asked_for_and_never_more_than_fits():
    wanted = plan(MEDIUM, settings(max_seq_len=2048, max_num_seqs=2)).num_blocks
    assert plan(MEDIUM, settings(max_seq_len=2048, max_num_seqs=64)).num_blocks > wanted
    crowded = plan(MEDIUM, settings(max_seq_len=2048, max_num_seqs=200))
    assert crowded.fits and crowded.num_blocks < 200 * 128 and crowded.device_total <= crowded.device_limit
    fixed = plan(MEDIUM, settings(max_seq_len=2048, kv_cache=GIB))
    assert fixed.fits and fixed.device["kv"] <= GIB
    too_small = plan(MEDIUM, settings(max_seq_len=2048, kv_cache=10 << 20))
    assert not too_small.fits and any(s.text == "kv_cache: auto" for s in too_small.suggestions)


@pytest.mark.parametrize("changes", [{"max_seq_len": 32768, "max_num_seqs": 8}, {"max_seq_len": 16384, "kv_cache": 4 * GIB}])
def test_suggestions_fit_when_they_are_applied(changes):
    wanted = settings(**changes)
    made = plan(MEDIUM, msgspec.structs.replace(wanted, utilisation=0.6))
    assert not made.fits and made.suggestions
    for suggestion in made.suggestions:
        if suggestion.changes:
            assert plan(MEDIUM, msgspec.structs.replace(wanted, utilisation=0.6, **suggestion.changes)).fits


def test_a_16_bit_model_is_offered_in_4_bits():
    made = plan(shape(32, 4096, 11008, 32, bits4=False), settings(max_seq_len=2048, max_num_seqs=2))
    assert not made.fits and [s.text for s in made.suggestions] == ["a 4-bit variant of this model"]


def test_on_a_cpu_everything_shares_the_hosts_memory_and_swap_counts_nothing():
    memory = Memory(8 * GIB, 8 * GIB)
    on_cpu = settings(device="cpu", device_memory=memory, host_memory=memory, max_seq_len=2048, max_num_seqs=2, swap_space=GIB)
    made = plan(MEDIUM, on_cpu)
    assert made.fits and "swap" not in made.host
    limit = made.device_total + made.host_total
    tight = Memory(limit + GIB, limit + GIB - (200 << 20))  # the reserve leaves 200 MiB too little for all, not for one window
    less = plan(MEDIUM, msgspec.structs.replace(on_cpu, device_memory=tight, host_memory=tight, utilisation=1.0))
    assert less.fits and 128 <= less.num_blocks < made.num_blocks and less.device_total + less.host_total <= less.device_limit


def test_a_host_that_cannot_hold_the_swap_space_is_refused():
    assert not plan(MEDIUM, settings(max_seq_len=2048, max_num_seqs=2, swap_space=40 * GIB)).fits


def test_sliding_windows_are_counted_as_the_pool_holds_them():
    windowed = msgspec.structs.replace(MEDIUM, sliding_window=512, window_layers=28)
    assert windowed.kv_token_bytes == MEDIUM.kv_token_bytes


def test_a_shape_is_read_from_a_description_with_keys_of_its_own():
    described = msgspec.structs.asdict(MEDIUM) | {"architecture": "llama", "chat_template": True}
    assert shape_of(described) == MEDIUM


def test_where_only_memory_is_missing_the_plan_says_how_much():
    def within(mib: int):
        memory = Memory(mib << 20, mib << 20)
        return plan(MEDIUM, settings(device="cpu", device_memory=memory, host_memory=memory))

    made = within(512)
    (text,) = (s.text for s in made.suggestions)
    more = int(text.split(" MiB more memory")[0].replace(",", ""))
    assert not made.fits and within(512 + more).fits and not within(512 + more - 64).fits


def test_a_card_has_room_for_a_matrix_on_its_way_into_its_packed_form():
    """Where pool and temporaries are smaller than that: two numbers in a byte, beside the weights."""
    small = msgspec.structs.replace(MEDIUM, intermediate=200_000)
    made = plan(small, settings(max_seq_len=256, max_num_seqs=1, prefill_chunk_tokens=16))
    assert made.device["packing"] + made.device["kv"] + made.device["activation"] == small.intermediate * small.hidden
    assert made.fits == (made.device_total <= made.device_limit)
    assert "packing" not in plan(MEDIUM, settings(max_seq_len=2048, max_num_seqs=2)).device


def test_no_part_of_a_card_is_told_in_place_of_the_hosts():
    """The table, metrics and `/ui` put both into one list by name."""
    small = msgspec.structs.replace(MEDIUM, intermediate=200_000)
    shared = Shared(backends=3 << 20, gpu_backends=5 << 20)
    made = plan(small, settings(max_seq_len=256, max_num_seqs=1, prefill_chunk_tokens=16, shared=shared))
    assert {"packing", "gpu_backends"} <= made.device.keys() and {"loading", "backends"} <= made.host.keys()
    assert not made.device.keys() & made.host.keys()
    assert all(f"  {name} " in made.table() for name in made.device | made.host)
