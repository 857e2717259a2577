"""What a transformer is to a planner: its sizes, its parameters and its operations.

D is the width, F the inner width of the MLP, V the vocabulary, T the tokens of a
sequence. All sizes count one whole model; nothing here knows of ranks.
"""

from typing import NamedTuple


class Model(NamedTuple):
    """The sizes of a Llama, or of a GPT: no gate, biases, learned positions, tied head.

    A GPT here also has no flash attention: it keeps and reads the T x T scores.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    inner: int
    vocabulary: int
    is_gpt: bool = False
    positions: int = 0  # of a GPT: rows of its matrix of positions

    @property
    def kv_width(self) -> int:
        """Return the columns of the key matrix, and of the value matrix."""
        return self.width * self.kv_heads // self.heads

    def matrices(self) -> dict[str, int]:
        """Return the weights in each matrix of a block."""
        mlp = {"up": self.width * self.inner, "down": self.width * self.inner}
        if not self.is_gpt:
            mlp["gate"] = self.width * self.inner
        kv = self.width * self.kv_width
        return {
            "query": self.width**2,
            "key": kv,
            "value": kv,
            "out": self.width**2,
        } | mlp

    def block(self) -> int:
        """Return the parameters of a block: matrices, biases, norms."""
        # A GPT's biases (9 D) and LayerNorms (4 D); a Llama's two RMSNorms.
        return sum(self.matrices().values()) + (13 if self.is_gpt else 2) * self.width

    def embedding(self) -> int:
        """Return the parameters before the first block."""
        return (self.vocabulary + self.positions) * self.width

    def head(self) -> int:
        """Return the parameters after the last block that no other part has."""
        # Narayanan et al. leave out a GPT's last norm, and so does this.
        return 0 if self.is_gpt else (self.vocabulary + 1) * self.width

    def parameters(self) -> int:
        """Return the number of parameters.

        For a GPT it is 12 l h^2 (1 + 13 / 12 h + (V + s) / 12 l h): Narayanan et al.,
        2021, arXiv 2104.04473, equation 2.
        """
        return self.layers * self.block() + self.embedding() + self.head()

    def block_operations(self) -> int:
        """Return the operations of a block's matrices in forward, for one token."""
        return 2 * sum(self.matrices().values())

    def head_operations(self) -> int:
        """Return those of the head: logits over the vocabulary."""
        return 2 * self.vocabulary * self.width

    def attention_operations(self, sequence: int) -> int:
        """Return those of a block's attention, scores and sum of values, for a token.

        Flash attention skips what the causal mask hides: half. A GPT computes it.
        """
        return (4 if self.is_gpt else 2) * sequence * self.width


# Llama 2: arXiv 2307.09288 and its config.json; Llama 3.1: assets/09_torchtitan.csv;
# TinyLlama: arXiv 2401.02385 and its config.json.
MODELS = {
    "tinyllama-1.1b": Model(22, 2048, 32, 4, 5632, 32000),
    "llama2-7b": Model(32, 4096, 32, 32, 11008, 32000),
    "llama2-13b": Model(40, 5120, 40, 40, 13824, 32000),
    "llama2-70b": Model(80, 8192, 64, 8, 28672, 32000),
    "llama3-8b": Model(32, 4096, 32, 8, 14336, 128256),
    "llama3-70b": Model(80, 8192, 64, 8, 28672, 128256),
    "llama3-405b": Model(126, 16384, 128, 8, 53248, 128256),
}


def read_model(text: str) -> Model:
    """Return a model by its name, or by `layers,width,heads,kv_heads,inner,vocabulary`.

    Raises ValueError, with one line, if the text is neither.
    """
    if text in MODELS:
        return MODELS[text]
    sizes = text.split(",")
    are_numbers = len(sizes) == 6 and all(n.lstrip("-").isdecimal() for n in sizes)
    if are_numbers and min(int(n) for n in sizes) < 1:
        raise ValueError(f"--model={text}: a size is not above 0")
    if are_numbers and max(map(len, sizes)) > 9:
        raise ValueError("--model: a size is not below a billion")
    if len(sizes) != 6 or not all(n.isdecimal() and int(n) for n in sizes):
        names = ", ".join(MODELS)
        raise ValueError(
            f"no model {text!r}: take {names}, or six sizes with commas between them: "
            "layers,width,heads,kv_heads,inner,vocabulary"
        )
    model = Model(*[int(n) for n in sizes])  # type: ignore[arg-type]
    if model.width % model.heads or model.heads % model.kv_heads:
        raise ValueError(
            f"{model.heads} heads of {model.kv_heads} kv heads do not divide "
            f"{model.width} evenly"
        )
    return model
