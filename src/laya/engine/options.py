"""Scoring given texts as what a model would say next: each option's log-probability, from as few runs as the options need.

In (preparation worker): the options' token ids. Out: `OptionPaths`: the runs (each the prompt and some tokens behind it), at
which positions of them which next tokens are asked for, and the way from those figures to one log-probability an option.
Options that begin alike share runs: they form a tree of tokens, every node with children is on one run, and options of one
token each need only the prompt itself. Pure; any thread.
"""

from __future__ import annotations

from collections.abc import Iterable

Edge = tuple[int, int]  # (node, next token id)


class OptionPaths:
    """`paths[i]` are the tokens that run i has behind the prompt; `asked(i, n)` what it must tell for a prompt of n tokens.

    `options` are token ids, all different. An option that is the beginning of another needs the end token behind it.
    """

    __slots__ = ("paths", "longest", "_edges", "_nodes_of")

    def __init__(self, options: list[list[int]], end_token: int | None) -> None:
        whole = _ended(options, end_token)
        children: list[dict[int, int]] = [{}]  # node -> next token -> node; a leaf is a node without children
        self._edges = [list(_walk(children, ids)) for ids in whole]
        self.paths: list[list[int]] = []
        self._nodes_of: list[list[tuple[int, int, list[int]]]] = []  # run -> (depth, node, tokens asked for)
        self._cover(children)
        self.longest = max(len(path) for path in self.paths)

    def _cover(self, children: list[dict[int, int]]) -> None:
        """Runs that pass every node with children; each node is asked for on the first run that passes it."""
        pending: list[tuple[list[int], list[tuple[int, int]]]] = [([], [(0, 0)])]  # (tokens, nodes not yet asked for)
        while pending:
            ids, fresh = pending.pop()
            node = fresh[-1][1]
            inner = [(token, child) for token, child in children[node].items() if children[child]]
            if not inner:
                self.paths.append(ids)
                self._nodes_of.append([(depth, at, list(children[at])) for depth, at in fresh])
                continue
            for i, (token, child) in enumerate(inner):
                below = (len(ids) + 1, child)
                pending.append(([*ids, token], [*fresh, below] if i == 0 else [below]))

    def asked(self, run: int, prompt_tokens: int) -> dict[int, tuple[int, list[int]]]:
        """Position -> (node, the next tokens whose log-probabilities are wanted there)."""
        return {prompt_tokens - 1 + depth: (node, tokens) for depth, node, tokens in self._nodes_of[run]}

    def totals(self, figures: dict[Edge, float]) -> tuple[float, ...]:
        """The log-probability of each option, in the order given."""
        return tuple(sum(figures[edge] for edge in edges) for edges in self._edges)


def _ended(options: list[list[int]], end_token: int | None) -> list[list[int]]:
    """Options with the end token where one is the beginning of another, or empty."""
    beginnings = {tuple(ids[:count]) for ids in options for count in range(len(ids))}
    if end_token is None:
        return options
    return [[*ids, end_token] if not ids or tuple(ids) in beginnings else ids for ids in options]


def _walk(children: list[dict[int, int]], ids: Iterable[int]) -> Iterable[Edge]:
    """The edges of one option, nodes made as they are needed."""
    node = 0
    for token in ids:
        yield node, token
        if token not in children[node]:
            children.append({})
            children[node][token] = len(children) - 1
        node = children[node][token]
