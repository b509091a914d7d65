"""Keys share an engine of this process fairly: one that floods the queue does not keep another waiting behind all of it."""

from __future__ import annotations

import json
import threading
import time

from server import running

BODY = {"messages": [{"role": "user", "content": "Count."}], "max_tokens": 24, "temperature": 0}
FLOOD = 8


def test_a_key_with_one_request_is_not_served_behind_anothers_flood(model_path, tmp_path):
    keys = [{"name": name, "key": f"key-of-{name}"} for name in ("flood", "one")]
    config = {"auth": {"keys": keys}, "inference": {"model": str(model_path), "max_num_seqs": 1, "max_seq_len": 512}}
    ended: list[str] = []

    with running(config, tmp_path, "serve") as laya:
        laya.wait_ready()

        def ask(name: str) -> None:
            status, raw, _ = laya.call(
                "POST", "/v1/chat/completions", {**BODY, "model": "local"}, {"x-api-key": f"key-of-{name}"}, timeout=120
            )
            ended.append(name if status == 200 else raw.decode())

        threads = [threading.Thread(target=ask, args=("flood",)) for _ in range(FLOOD)]
        for thread in threads:
            thread.start()
        assert laya.wait_for(lambda: laya.metric("laya_sequences_waiting") >= FLOOD - 2, 30)
        threads.append(threading.Thread(target=ask, args=("one",)))
        threads[-1].start()
        for thread in threads:
            thread.join(120)
        assert sorted(ended) == ["flood"] * FLOOD + ["one"]
        assert ended.index("one") < FLOOD - 1, f"it waited for the whole flood: {ended}"
        until = time.monotonic() + 5
        while time.monotonic() < until and laya.metric("laya_key_tokens_total", key="one", kind="generated") == 0:
            time.sleep(0.05)
        assert 1 <= laya.metric("laya_key_tokens_total", key="one", kind="generated") <= 24
        assert laya.metric("laya_key_tokens_total", key="flood", kind="prompt") > 0
        assert "key-of-" not in json.dumps(laya.lines)
