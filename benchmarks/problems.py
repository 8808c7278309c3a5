"""The products that benchmarks measure: of public language models, squares, ragged, batched, other layouts, fused."""

from __future__ import annotations

import dataclasses

from search_spaces.matmul import MatmulProblem


@dataclasses.dataclass(frozen=True)
class Model:
    """The extents of a language model that its products have.

    Attributes:
      hidden: width of the residual stream.
      mlp: width of the hidden layer of an MLP.
      heads, kv_heads, head: query heads, key and value heads, and the width of one.
      vocabulary: rows of the embedding.
      tied: the LM head multiplies by the embedding, ``[vocabulary, hidden]`` as it lies.
    """

    name: str
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int
    tied: bool = False


# The config.json that each model is published with on huggingface.co. Papers: Llama 3 arXiv:2407.21783, Mistral 7B
# arXiv:2310.06825, Qwen2.5 arXiv:2412.15115, Gemma 2 arXiv:2408.00118, GPT-2 Radford et al. 2019.
LLAMA_3_8B = Model("Llama 3 8B", 4096, 14336, heads=32, kv_heads=8, head=128, vocabulary=128256)
LLAMA_3_70B = Model("Llama 3 70B", 8192, 28672, heads=64, kv_heads=8, head=128, vocabulary=128256)
MISTRAL_7B = Model("Mistral 7B", 4096, 14336, heads=32, kv_heads=8, head=128, vocabulary=32000)
QWEN_2_5_3B = Model("Qwen2.5 3B", 2048, 11008, heads=16, kv_heads=2, head=128, vocabulary=151936, tied=True)
QWEN_2_5_7B = Model("Qwen2.5 7B", 3584, 18944, heads=28, kv_heads=4, head=128, vocabulary=152064)
GEMMA_2_27B = Model("Gemma 2 27B", 4608, 36864, heads=32, kv_heads=16, head=128, vocabulary=256000, tied=True)
GPT_2 = Model("GPT-2", 768, 3072, heads=12, kv_heads=12, head=64, vocabulary=50257, tied=True)


@dataclasses.dataclass(frozen=True)
class Product:
    """A problem, and where it comes from, in words."""

    problem: MatmulProblem
    origin: str

    def __str__(self) -> str:
        return f"{self.problem} ({self.origin})"


def _qkv(model: Model, tokens: int) -> Product:
    columns = (model.heads + 2 * model.kv_heads) * model.head
    return Product(MatmulProblem(tokens, columns, model.hidden), f"{model.name}, queries, keys and values")


def _attention_out(model: Model, tokens: int) -> Product:
    return Product(MatmulProblem(tokens, model.hidden, model.heads * model.head), f"{model.name}, attention output")


def _mlp_in(model: Model, tokens: int) -> Product:
    return Product(MatmulProblem(tokens, model.mlp, model.hidden), f"{model.name}, into the MLP")


def _mlp_out(model: Model, tokens: int) -> Product:
    return Product(MatmulProblem(tokens, model.hidden, model.mlp), f"{model.name}, out of the MLP")


def _mlp_weight_gradient(model: Model, tokens: int) -> Product:
    problem = MatmulProblem(model.hidden, model.mlp, tokens, transpose_a=True)
    return Product(problem, f"{model.name}, gradient of the weights into the MLP")


def _lm_head(model: Model, tokens: int) -> Product:
    problem = MatmulProblem(tokens, model.vocabulary, model.hidden, transpose_b=model.tied)
    return Product(problem, f"{model.name}, LM head")


def _attention_scores(model: Model, tokens: int) -> Product:
    problem = MatmulProblem(tokens, tokens, model.head, batch=model.heads, transpose_b=True)
    return Product(problem, f"{model.name}, attention scores")


def _attention_values(model: Model, tokens: int) -> Product:
    problem = MatmulProblem(tokens, model.head, tokens, batch=model.heads)
    return Product(problem, f"{model.name}, attention values")


# Those of the first 21 that were measured before there were more, in their order.
MATMULS = (
    Product(MatmulProblem(4096, 4096, 4096), "square"),
    Product(MatmulProblem(8192, 8192, 8192), "square"),
    Product(MatmulProblem(4096, 8192, 4096), "what JAX's own kernel is shown with"),
    _mlp_in(LLAMA_3_8B, 2048),
    _mlp_out(LLAMA_3_8B, 4096),
    Product(MatmulProblem(2048, 5120, 5120), "tiles of powers of two fill 132 cores badly"),
    _attention_out(LLAMA_3_8B, 1024),
    Product(MatmulProblem(1024, 1024, 2048), "small"),
    Product(MatmulProblem(512, 512, 512), "square, small"),
    _mlp_in(LLAMA_3_8B, 256),
    _attention_out(LLAMA_3_70B, 128),
    _attention_out(LLAMA_3_70B, 16),
    _mlp_out(LLAMA_3_8B, 16),
    Product(MatmulProblem(1000, 1000, 1000), "ragged"),
    Product(MatmulProblem(4000, 4160, 4160), "ragged"),
    Product(MatmulProblem(4001, 4040, 4104), "ragged, rows of odd lengths"),
    Product(MatmulProblem(4096, 4096, 4096, transpose_b=True), "layout"),
    Product(MatmulProblem(4096, 4096, 4096, transpose_a=True), "layout"),
    Product(MatmulProblem(4096, 4096, 4096, dtype="float16"), "dtype"),
    Product(MatmulProblem(4096, 4096, 4096, out_dtype="float32"), "dtype"),
    Product(MatmulProblem(1024, 1024, 1024, batch=16), "batch"),
    # One token of one sequence, then one each of 16 to 256 sequences.
    _qkv(LLAMA_3_8B, 1),
    _lm_head(LLAMA_3_8B, 1),
    _mlp_in(LLAMA_3_70B, 16),
    _lm_head(MISTRAL_7B, 16),
    _qkv(QWEN_2_5_7B, 64),
    _lm_head(QWEN_2_5_3B, 64),
    # DeepSeek-V3 (arXiv:2412.19437, section 4.2): width 7168; 128 heads of 128, to whose queries and keys 64 rotated
    # columns are added; queries by way of 1536 columns, keys and values of 512 with one rotated key; dense MLP 18432.
    Product(MatmulProblem(64, 7168, 128 * 128), "DeepSeek-V3, attention output"),
    Product(MatmulProblem(128, 7168, 18432), "DeepSeek-V3, out of the dense MLP"),
    _lm_head(LLAMA_3_8B, 128),
    _qkv(LLAMA_3_70B, 256),
    # Whole prompts, and batches of training.
    _mlp_in(GPT_2, 1024),
    _lm_head(GPT_2, 1024),
    _mlp_in(GEMMA_2_27B, 1024),
    Product(MatmulProblem(2048, 128 * (128 + 64), 1536), "DeepSeek-V3, queries from their compression"),
    Product(MatmulProblem(2048, 512 + 64, 7168), "DeepSeek-V3, compression of keys and values"),
    _qkv(LLAMA_3_8B, 4096),
    Product(MatmulProblem(4096, 18432, 7168), "DeepSeek-V3, into the dense MLP"),
    _attention_out(LLAMA_3_8B, 8192),
    _mlp_in(LLAMA_3_70B, 8192),
    _mlp_weight_gradient(LLAMA_3_8B, 4096),
    Product(MatmulProblem(2048, 2048, 2048), "square"),
    _attention_scores(LLAMA_3_8B, 1024),
    _attention_values(LLAMA_3_8B, 1024),
    Product(MatmulProblem(512, 512, 512, batch=4), "batch, small"),
    # Kinds of products that XLA is hard to beat at: short k, results of 500 MB, waves that are part empty, ragged k.
    Product(MatmulProblem(16384, 16384, 512), "short k, large result"),
    Product(MatmulProblem(32768, 8192, 512), "short k, large result"),
    Product(MatmulProblem(2560, 5120, 5120), "last wave part empty"),
    Product(MatmulProblem(2304, 4096, 8192), "last wave part empty"),
    Product(MatmulProblem(3328, 4608, 4096), "last wave part empty"),
    Product(MatmulProblem(5000, 3000, 7000), "ragged, rows of 16 bytes"),
    Product(MatmulProblem(2000, 6000, 3000), "ragged, rows of 16 bytes"),
    Product(MatmulProblem(3000, 5000, 1000), "ragged, rows of 16 bytes"),
    Product(MatmulProblem(8192, 151936, 1024, transpose_b=True), "large vocabulary"),
    Product(MatmulProblem(16384, 32000, 1024), "large vocabulary"),
    Product(MatmulProblem(12288, 4096, 4096), "wide prefill"),
    Product(MatmulProblem(12288, 5120, 1536), "wide prefill"),
    Product(MatmulProblem(512, 512, 1024, batch=64), "batch"),
    Product(MatmulProblem(2048, 1024, 1024, batch=8), "batch"),
    _mlp_in(GPT_2, 8192),
    # Rows that 128 bytes do not divide, 32 or 64 do. SigLIP So400m (arXiv:2303.15343): 8 images of 27 x 27 patches.
    Product(MatmulProblem(5832, 4304, 1152), "SigLIP So400m, into the MLP"),
    Product(MatmulProblem(5832, 1152, 4304), "SigLIP So400m, out of the MLP"),
    Product(MatmulProblem(4096, 32016, 4096), "Code Llama 7B, LM head"),
    Product(MatmulProblem(7232, 9904, 672), "drawn at random"),
    Product(MatmulProblem(840, 3360, 4208), "drawn at random"),
)
# Searched twice, to see whether two searches agree. The first is also the one that a search is timed by.
REPEATED = (
    MatmulProblem(4096, 4096, 4096),
    MatmulProblem(8192, 8192, 8192),
    MatmulProblem(2048, 14336, 4096),
    MatmulProblem(2048, 5120, 5120),
    MatmulProblem(1024, 1024, 2048),
    MatmulProblem(256, 14336, 4096),
    MatmulProblem(128, 8192, 8192),
    MatmulProblem(4000, 4160, 4160),
    MatmulProblem(4096, 4096, 4096, transpose_b=True),
    MatmulProblem(1024, 1024, 1024, batch=16),
)
# Where the interpreter rehearses: a run of seconds whose times say nothing about the kernels.
REHEARSED = tuple(
    Product(MatmulProblem(m, n, k, dtype="float32"), "rehearsal")
    for m, n, k in ((128, 128, 128), (256, 128, 64), (100, 70, 90), (1, 256, 256))
)


def _fused(product: Product, what: str, **follows: str) -> Product:
    return Product(dataclasses.replace(product.problem, **follows), f"{product.origin}, {what}")


_RESIDUAL = {"residual": "bfloat16"}
# With what their models add to them, or apply.
FUSED = (
    _fused(_mlp_in(GPT_2, 1024), "its bias and gelu", bias="bfloat16", activation="gelu"),
    _fused(_mlp_in(GPT_2, 8192), "its bias and gelu", bias="bfloat16", activation="gelu"),
    _fused(_qkv(QWEN_2_5_7B, 64), "its bias", bias="bfloat16"),
    _fused(_qkv(QWEN_2_5_7B, 4096), "its bias", bias="bfloat16"),
    _fused(_mlp_in(LLAMA_3_8B, 4096), "the gate's silu", activation="silu"),
    _fused(_mlp_out(LLAMA_3_8B, 16), "the residual stream", **_RESIDUAL),
    _fused(_mlp_out(LLAMA_3_8B, 4096), "the residual stream", **_RESIDUAL),
    _fused(_attention_out(LLAMA_3_8B, 1024), "the residual stream", **_RESIDUAL),
    _fused(_attention_out(LLAMA_3_8B, 8192), "the residual stream", **_RESIDUAL),
    Product(
        MatmulProblem(4096, 4096, 4096, bias="bfloat16", activation="gelu", residual="bfloat16"),
        "square, with all that may follow",
    ),
)
FUSED_REHEARSED = (
    Product(MatmulProblem(128, 64, 96, dtype="float32", bias="float32", activation="gelu"), "rehearsal"),
    Product(MatmulProblem(32, 128, 64, dtype="float32", residual="float32"), "rehearsal"),
)
