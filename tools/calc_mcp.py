"""A tool server for scripted client runs: one tool, `add`, over the Model Context Protocol on standard input and output."""

from __future__ import annotations

import json
import sys

ADD = {
    "name": "add",
    "description": "Add two numbers.",
    "inputSchema": {
        "type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}, "required": ["a", "b"],
    },
}  # fmt: skip


def result_of(method: str, params: dict) -> dict | None:
    """The result of a request; None for a notification or an unknown method."""
    if method == "initialize":
        version = params.get("protocolVersion", "2024-11-05")
        return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": {"name": "calc", "version": "1"}}
    if method == "tools/list":
        return {"tools": [ADD]}
    if method == "tools/call":
        given = params.get("arguments", {})
        return {"content": [{"type": "text", "text": f"sum={given['a'] + given['b']}"}], "isError": False}
    return {} if method == "ping" else None


def main() -> None:
    for line in sys.stdin:
        message = json.loads(line)
        if "id" not in message:
            continue
        result = result_of(message.get("method", ""), message.get("params") or {})
        reply = {"jsonrpc": "2.0", "id": message["id"]}
        reply |= {"error": {"code": -32601, "message": "no such method"}} if result is None else {"result": result}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
