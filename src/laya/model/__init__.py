"""The only room with torch: a model file becomes a `Runner` and a `Tokenizer` (engine/step.py).

In: a path and sizes (`load.load`), then one list of `Scheduled` a step. Out: tokens with their log-probabilities.
Called by the composition root and, from then on, by the engine thread alone; the tokenizer also by the preparation worker.
`describe.describe` reads headers only and imports no torch, so that a memory plan costs nothing.
"""
