"""More networks of other packages, and those that are refused; see `networks_of_packages`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from networks_of_packages import of_package
from other_packages import Reads, inside, package, reads
from rows_compared import Made
from torch import nn
from tutorial_networks import made, numbers, settled, whole

REFUSED: dict[str, tuple[Callable[[], Made], str]] = {}  # the maker, and what the refusal has to say


def refused(says: str) -> Callable[[Callable[[], Made]], Callable[[], Made]]:
    def keep(make: Callable[[], Made]) -> Callable[[], Made]:
        REFUSED[make.__name__] = make, says
        return make

    return keep


@of_package
def splines_of_pykan() -> Made:
    """A layer of a Kolmogorov-Arnold network: splines on edges, whose coefficients are a tensor of three axes."""
    kan = package("kan.KANLayer")
    torch.manual_seed(0)
    layer = kan.KANLayer(in_dim=2, out_dim=3, num=3, k=2, noise_scale=0.3, device="cpu")
    loose = {"*_max": "scale_base", "*_sum": "scale_base", "vc_dimension": "scale_base"}
    groups, scales = {"model.coef": 2}, ("*scale*",)
    return made(
        reads(layer, lambda m, x: m(x)[0]),
        numbers(7, 2) / 3,
        no_layers=scales,
        groups=groups,
        refused=loose | {"*": ""},
    )


@of_package
def words_of_x_transformers() -> Made:
    """A decoder with rotary positions and gated layers, as a language model."""
    xt = package("x_transformers")
    torch.manual_seed(0)
    layers = xt.Decoder(dim=6, depth=1, heads=2, attn_dim_head=3, rotary_pos_emb=True, ff_swish=True, ff_glu=True)
    model = xt.TransformerWrapper(num_tokens=7, max_seq_len=6, attn_layers=layers, use_abs_pos_emb=False)
    tokens = whole(7, 4, 6)
    # Its softmax is in float32, whatever the network is in.
    # Its softmax is in float32 whatever it is given, and so is that of the computation that it is held against.
    return Made(reads(model, lambda m, x: m(x)), tokens[:, :-1], tokens[:, 1:], loss="next_token", exact=1e-5)


@refused("not a number|finite")
def scans_of_mingru() -> Made:
    """A recurrent layer whose states come from a scan in logarithms."""
    mingru = package("minGRU_pytorch.minGRU")
    torch.manual_seed(0)
    parts = nn.ModuleList([mingru.minGRU(3), nn.Linear(3, 3)])
    return made(reads(parts, lambda m, x: m[1](m[0](x)[:, -1])), numbers(6, 4, 3))


@of_package
def residual_network_of_pytorchcv() -> Made:
    """A pre-activation block with a projection."""
    blocks = package("pytorchcv.models.preresnet")
    torch.manual_seed(0)
    unit = blocks.PreResUnit(in_channels=3, out_channels=4, stride=2, bottleneck=False, conv1_stride=False)
    parts = nn.ModuleList([unit, nn.Linear(4, 3)])
    model = Reads(parts, lambda m, x: m[1](m[0](x).mean((2, 3))))
    x = numbers(4, 3, 6, 6)
    return made(settled(model, x), x)


@refused("other samples of the batch")
def attention_of_nystrom() -> Made:
    """Attention by landmarks and an iterated inverse."""
    nystrom = package("nystrom_attention")
    torch.manual_seed(0)
    sizes = {"dim": 6, "dim_head": 3, "heads": 2, "num_landmarks": 2, "pinv_iterations": 3}
    parts = nn.ModuleList([nystrom.NystromAttention(**sizes, residual=False), nn.Linear(6, 3)])
    return made(reads(parts, lambda m, x: m[1](m[0](x).mean(1))), numbers(4, 4, 6))


@of_package
def flows_of_zuko() -> Made:
    """A masked autoregressive flow; the loss is its likelihood."""
    zuko = package("zuko.flows")
    torch.manual_seed(0)
    flow = zuko.MAF(3, 0, transforms=1, hidden_features=(6,))
    for module in flow.modules():
        if hasattr(module, "mask") and hasattr(module, "weight"):
            module.weight.data *= module.mask
    model = reads(flow, lambda m, x: m().log_prob(x)[:, None])
    return Made(model, numbers(6, 3), torch.zeros(6), loss=lambda o, y: -o[:, 0])


@of_package
def encoder_and_decoder_of_transformers() -> Made:
    """T5: relative positions, two stacks, labels of their own."""
    transformers = package("transformers")
    torch.manual_seed(0)
    sizes = {"d_model": 6, "d_kv": 3, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 9, "pad_token_id": None}
    config = transformers.T5Config(**sizes, use_cache=False, tie_word_embeddings=False, dropout_rate=0.0)
    model = transformers.T5ForConditionalGeneration(config).double().eval()
    inputs = {"input_ids": whole(9, 4, 5), "decoder_input_ids": whole(9, 4, 4, seed=2)}
    tied = ("-shared.weight",)
    # Its norms are in float32, whatever the network is in; the table of words is shared by both stacks.
    return Made(model, inputs, whole(9, 4, 4, seed=3), loss="next_token", input_first=tied, exact=1e-5)


@of_package
def spectra_of_transformers() -> Made:
    """FNet: Fourier transforms in the place of attention."""
    transformers = package("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 6, "num_hidden_layers": 1, "intermediate_size": 8, "max_position_embeddings": 8}
    config = transformers.FNetConfig(vocab_size=9, num_labels=3, type_vocab_size=2, hidden_dropout_prob=0.0, **sizes)
    model = transformers.FNetForSequenceClassification(config).double().eval()
    return Made(model, {"input_ids": whole(9, 4, 5)}, whole(3, 4), smooth=True)


@refused("complex")
def operator_of_neuraloperator() -> Made:
    """A Fourier neural operator: its weights are complex numbers."""
    models = package("neuralop.models")
    torch.manual_seed(0)
    model = models.FNO(n_modes=(2, 2), in_channels=1, out_channels=1, hidden_channels=4, n_layers=1)
    return Made(model.eval(), numbers(3, 1, 6, 6).float(), numbers(3, 1, 6, 6).float(), loss="mse")


@refused("keep|state|copied|activations")
def spikes_of_snntorch() -> Made:
    """Spiking neurons that keep their membrane on the module."""
    snn = package("snntorch")
    parts = nn.ModuleList([nn.Linear(3, 5), snn.Leaky(beta=0.9, init_hidden=True, output=True)])
    model = Reads(parts, lambda m, x: m[1](m[0](x))[1]).eval()
    model(numbers(4, 3).float())
    return Made(model, numbers(4, 3).float(), whole(5, 4))


@refused("second derivative|differentiable")
def scan_of_mambapy() -> Made:
    """Mamba's parallel scan, a function of its own whose backward autograd cannot differentiate."""
    mamba = package("mambapy.mamba")
    torch.manual_seed(0)
    parts = nn.ModuleList([mamba.Mamba(mamba.MambaConfig(d_model=4, n_layers=1, d_state=2)), nn.Linear(4, 2)])
    model = Reads(parts, lambda m, x: m[1](m[0](x)[:, -1])).eval()
    return Made(model, numbers(4, 4, 4).float(), whole(2, 4))


@refused("tensor")
def two_answers_of_facenet() -> Made:
    """MTCNN's first network as it comes, with two answers."""
    stubbed = ("torchvision", "torchvision.transforms", "torchvision.ops", "torchvision.ops.boxes")
    model = inside("facenet_pytorch", "models.mtcnn", stubbed).PNet(pretrained=False)
    return Made(model.eval(), numbers(3, 3, 12, 12).float(), whole(2, 3))


@refused("ScriptModule|script|torch.jit")
def script_of_silero() -> Made:
    """A network as a file of TorchScript."""
    model = torch.jit.script(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))
    return Made(model.eval(), numbers(4, 3).float(), whole(2, 4))
