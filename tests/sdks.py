"""The real SDKs, as tests use them: no retries of their own, a time limit."""

from __future__ import annotations

import anthropic
import openai

from server import Laya

KEYS = [{"name": "one", "key": "key-one"}, {"name": "two", "key": "key-two"}]

def openai_client(laya: Laya, key: str = "key-one"):
    return openai.OpenAI(base_url=f"{laya.url}/v1", api_key=key, max_retries=0, timeout=30)


def anthropic_client(laya: Laya, key: str = "key-one"):
    return anthropic.Anthropic(base_url=laya.url, api_key=key, max_retries=0, timeout=30)
