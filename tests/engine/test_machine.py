"""Memory figures of the machine, from files of both control group versions."""

from __future__ import annotations

from laya.engine.machine import (
    Memory,
    Swap,
    host_memory,
    memory_levels,
    offer_to_oom_killer,
    peak_resident,
    resident,
    swap,
)

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def machine(root, cgroup: str, files: dict[str, str]) -> Memory:
    files = {
        "proc/meminfo": "MemTotal:       16777216 kB\nMemFree:  1024 kB\nMemAvailable:    8388608 kB\n",
        "proc/self/cgroup": cgroup,
        **files,
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return host_memory(str(root))


def test_without_a_limit_the_kernels_figures_hold(tmp_path):
    assert machine(tmp_path, "0::/\n", {}) == Memory(16 * GIB, 8 * GIB)


def test_a_v2_limit_counts_clean_file_pages_as_free(tmp_path):
    group = "sys/fs/cgroup/app.slice/laya.scope/"
    files = {
        group + "memory.max": f"{4 * GIB}\n", group + "memory.current": f"{3 * GIB}\n",
        group + "memory.stat": f"anon {GIB}\ninactive_file {2 * GIB}\n",
    }  # fmt: skip
    assert machine(tmp_path, "0::/app.slice/laya.scope\n", files) == Memory(4 * GIB, 3 * GIB)


def test_a_limit_of_a_group_above_binds_too(tmp_path):
    files = {
        "sys/fs/cgroup/a/memory.max": f"{2 * GIB}\n", "sys/fs/cgroup/a/memory.current": f"{GIB}\n",
        "sys/fs/cgroup/a/b/memory.max": "max\n", "sys/fs/cgroup/a/b/memory.current": "0\n",
    }  # fmt: skip
    assert machine(tmp_path, "0::/a/b\n", files) == Memory(2 * GIB, GIB)


def test_a_container_whose_path_is_not_visible_takes_the_mounts_own_limit(tmp_path):
    files = {"sys/fs/cgroup/memory.max": f"{GIB}\n", "sys/fs/cgroup/memory.current": f"{256 * MIB}\n"}
    assert machine(tmp_path, "0::/docker/0123\n", files) == Memory(GIB, 768 * MIB)


def test_a_v1_limit_is_read_and_its_unlimited_value_changes_nothing(tmp_path):
    group = "sys/fs/cgroup/memory/box/"
    files = {
        group + "memory.limit_in_bytes": f"{6 * GIB}\n", group + "memory.usage_in_bytes": f"{GIB}\n",
        group + "memory.stat": f"total_inactive_file {GIB // 2}\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{9 * GIB}\n",
    }  # fmt: skip
    assert machine(tmp_path, "8:pids:/box\n4:cpu,memory:/box\n0::/\n", files) == Memory(6 * GIB, 5 * GIB + GIB // 2)


def test_a_group_over_its_limit_leaves_nothing(tmp_path):
    files = {"sys/fs/cgroup/memory.max": f"{GIB}\n", "sys/fs/cgroup/memory.current": f"{2 * GIB}\n"}
    assert machine(tmp_path, "0::/\n", files) == Memory(GIB, 0)


def test_this_machine_has_some_memory():
    memory = host_memory()
    assert 0 < memory.available <= memory.total


def test_every_level_is_told_apart(tmp_path):
    files = {"sys/fs/cgroup/memory.max": f"{GIB}\n", "sys/fs/cgroup/memory.current": f"{256 * MIB}\n"}
    machine(tmp_path, "0::/\n", files)
    assert memory_levels(str(tmp_path)) == [Memory(16 * GIB, 8 * GIB), Memory(GIB, 768 * MIB)]
    assert memory_levels(str(tmp_path))[1].used_share == 0.25


def test_swap_is_read_with_what_it_moved(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 8 kB\nMemAvailable: 4 kB\nSwapTotal: 2048 kB\nSwapFree: 512 kB\n")
    (tmp_path / "proc/vmstat").write_text("pswpin 3\npswpout 4\npgfault 9\n")
    found = swap(str(tmp_path))
    assert found.total == 2 * MIB and found.free == MIB // 2 and found.moved > 0 and found.moved % 7 == 0
    assert swap(str(tmp_path / "nothing")) == Swap(0, 0, 0)


def test_the_score_for_the_oom_killer_is_only_ever_raised(tmp_path):
    score = tmp_path / "proc/self/oom_score_adj"
    score.parent.mkdir(parents=True)
    for before, after in (("0\n", "500"), ("900\n", "900")):
        score.write_text(before)
        assert offer_to_oom_killer(500, str(tmp_path)) and score.read_text().strip() == after
    assert not offer_to_oom_killer(500, str(tmp_path / "nothing"))


def test_this_process_is_resident():
    assert 0 < resident() <= peak_resident() + 64 * MIB
