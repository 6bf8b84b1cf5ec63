"""Captured launches on a CUDA device: rebuilt from the stored bytes they give what the same groups give.

For each subject (``subjects``): every signature is captured; one iteration of each program is run by the compiled
groups, by a CUDA graph rebuilt from the stored launches over fresh buffers, and by the ops eagerly (``iteration``,
``check``). Timed for the Llama-3-8B shapes: all groups in one graph beside ``torch.compile`` of the whole model
(``timing``). Each subject has a process of its own.
"""

DEVICE = "cuda:0"
