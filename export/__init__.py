# SPDX-License-Identifier: Apache-2.0
"""From a fine-tuned Hugging Face BERT classifier to the files Triton serves; knows nothing of perf/ and of clients."""
