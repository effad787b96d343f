"""Converts texts into word ids, as input for a numeric model."""

import numpy as np
from vocabulary import UNKNOWN, load_vocabulary

from xlaserve import Context, InferenceError, PythonModel

LENGTH = 8


class Words(PythonModel):
    inputs = {"text": ("BYTES", [1])}
    outputs = {"ids": ("INT32", [LENGTH])}
    max_batch_size = 64
    batched = True  # one call handles the rows of all batched requests

    def load(self, context: Context) -> None:
        self.numbers = load_vocabulary(context.directory / "words.txt")
        self.unknown = context.counter("unknown_words_total", "Words that are not in the list")

    def infer(self, inputs):
        texts = inputs["text"][:, 0]
        ids = np.zeros((len(texts), LENGTH), np.int32)
        for row, text in enumerate(texts):
            words = text.decode(errors="replace").lower().split()
            if not words:
                raise InferenceError("the text has no words")
            found = [self.numbers.get(word, UNKNOWN) for word in words[:LENGTH]]
            self.unknown.increment(found.count(UNKNOWN))
            ids[row, : len(found)] = found
        return {"ids": ids}
