"""Networks of other packages at small sizes, with random weights: makers by name in `PACKAGES`."""

from __future__ import annotations

from typing import Any

import torch
from other_packages import inside, only, package, reads
from rows_compared import Made, Maker
from torch import Tensor, nn
from tutorial_networks import made, numbers, settled, whole

PACKAGES: dict[str, Maker] = {}


def of_package(make: Maker) -> Maker:
    PACKAGES[make.__name__] = make
    torch.manual_seed(0)
    return make


@of_package
def graphs_of_torch_geometric() -> Made:
    """Two dense graph convolutions and a mean over nodes; a sample is a padded graph."""
    layers = package("torch_geometric.nn")
    torch.manual_seed(0)
    parts = nn.ModuleList([layers.DenseGCNConv(3, 5), layers.DenseSAGEConv(5, 4), nn.Linear(4, 3)])

    def read(m: Any, x: Tensor, links: Tensor) -> Tensor:
        return m[2](m[1](torch.relu(m[0](x, links)), links).relu().mean(1))

    links = (numbers(6, 5, 5, seed=3).abs() > 0.8).double()
    inputs = numbers(6, 5, 3), ((links + links.mT) > 0).double()
    return made(reads(parts, read), inputs)


@of_package
def nodes_of_torch_geometric() -> Made:
    """GCN on one graph, which is a constant; a sample is the number of a node."""
    layers = package("torch_geometric.nn")
    torch.manual_seed(0)
    parts = nn.ModuleList([layers.GCNConv(3, 5), layers.GCNConv(5, 3)])
    parts.register_buffer("features", numbers(10, 3))
    parts.register_buffer("edges", whole(10, 2, 30))

    def read(m: Any, node: Tensor) -> Tensor:
        return m[1](m[0](m.features, m.edges).relu(), m.edges)[node]

    return made(reads(parts, read), torch.arange(10), refused={"psi_*": "read constants"})


@of_package
def attention_of_torch_geometric() -> Made:
    """Graph attention, on nodes as well."""
    layers = package("torch_geometric.nn")
    torch.manual_seed(0)
    parts = nn.ModuleList([layers.GATv2Conv(3, 4, heads=2), layers.GINConv(nn.Linear(8, 3))])
    parts.register_buffer("features", numbers(8, 3))
    parts.register_buffer("edges", whole(8, 2, 20))

    def read(m: Any, node: Tensor) -> Tensor:
        return m[1](m[0](m.features, m.edges).relu(), m.edges)[node]

    loose = dict.fromkeys(("*_max", "*_sum", "vc_dimension"), "cannot be followed") | {"psi_*": "read constants"}
    return made(reads(parts, read), torch.arange(8), no_layers=("*",), refused=loose)


@of_package
def segmentation_of_monai() -> Made:
    """A U-Net with residual units and PReLU: a class for every pixel."""
    nets = package("monai.networks.nets")
    torch.manual_seed(0)
    model = nets.UNet(2, 1, 2, (3, 4, 6), (2, 2), num_res_units=1, norm="BATCH")
    x = numbers(3, 1, 8, 8)
    return Made(settled(model, x), x, whole(2, 3, 8, 8))


@of_package
def denoiser_of_diffusers() -> Made:
    """A U-Net that is told the time, with attention and group norms."""
    diffusers = package("diffusers")
    torch.manual_seed(0)
    sizes = {"block_out_channels": (4, 8), "norm_num_groups": 2, "layers_per_block": 1, "attention_head_dim": 4}
    blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    model = diffusers.UNet2DModel(sample_size=4, in_channels=1, out_channels=1, **sizes, **blocks)
    model = only(model, "conv_in.*", "conv_out.*", "conv_norm_out.*", "mid_block.attentions.*", "time_embedding.*")
    inputs = numbers(2, 1, 4, 4), torch.tensor([3, 40])
    model = reads(model, lambda m, x, t: m(x, t).sample)
    return Made(model, inputs, numbers(2, 1, 4, 4, seed=2), "mse", True, exact=1e-5)


@of_package
def time_constants_of_ncps() -> Made:
    """CfC, closed-form cells in continuous time."""
    cells = package("ncps.torch")
    torch.manual_seed(0)
    model = reads(cells.CfC(3, 6, proj_size=3, backbone_units=5, backbone_layers=1), lambda m, x: m(x)[0][:, -1])
    return made(model, numbers(6, 4, 3), smooth=True)


@of_package
def pictures_of_vit_pytorch() -> Made:
    """ViT in einops."""
    vit = inside("vit_pytorch", "vit")
    torch.manual_seed(0)
    model = vit.ViT(image_size=8, patch_size=4, num_classes=3, dim=6, depth=1, heads=2, dim_head=3, mlp_dim=8)
    return made(model.double().eval(), numbers(4, 3, 8, 8), smooth=True, no_layers=("*pos_embedding", "*cls_token"))


@of_package
def mixer_of_vit_pytorch() -> Made:
    """Patches without a class token, sines for places."""
    vit = inside("vit_pytorch", "simple_vit")
    torch.manual_seed(0)
    model = vit.SimpleViT(image_size=8, patch_size=4, num_classes=3, dim=8, depth=1, heads=2, dim_head=3, mlp_dim=8)
    return made(reads(model, lambda m, x: m(x)), numbers(4, 3, 8, 8), smooth=True)


@of_package
def differential_equation_of_torchdiffeq() -> Made:
    """A neural differential equation by Runge and Kutta's fixed steps."""
    equations = package("torchdiffeq")
    torch.manual_seed(0)
    parts = nn.ModuleList([nn.Linear(3, 6), nn.Linear(6, 3), nn.Linear(3, 2)])

    def read(m: Any, x: Tensor) -> Tensor:
        times = torch.linspace(0, 1, 4).to(x)
        return m[2](equations.odeint(lambda t, h: m[1](torch.tanh(m[0](h))), x, times, method="rk4")[-1])

    return made(reads(parts, read), numbers(6, 3), smooth=True)


@of_package
def adapters_of_peft() -> Made:
    """LoRA on the queries and values of a small BERT."""
    transformers, peft = package("transformers"), package("peft")
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 12}
    config = transformers.BertConfig(vocab_size=20, num_labels=3, max_position_embeddings=8, **sizes)
    settings = peft.LoraConfig(r=2, target_modules=["query", "value"], task_type="SEQ_CLS", lora_dropout=0.0)
    model = peft.get_peft_model(transformers.BertForSequenceClassification(config), settings).double().eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_B" in name:
                value.copy_(torch.randn(value.shape, generator=torch.Generator().manual_seed(4)) / 3)
    inputs = {"input_ids": whole(20, 5, 6), "attention_mask": (torch.arange(6) < whole(4, 5, 1) + 3).long()}
    return Made(model, inputs, whole(3, 5), smooth=True)


@of_package
def sines_of_siren_pytorch() -> Made:
    """SIREN as its package has it."""
    siren = package("siren_pytorch")
    torch.manual_seed(0)
    model = siren.SirenNet(2, 6, 2, num_layers=2, w0_initial=3.0).double().eval()
    return Made(model, numbers(7, 2), numbers(7, 2, seed=2), loss="mse", smooth=True)


@of_package
def tables_of_rtdl() -> Made:
    """A residual network for tables of numbers."""
    models = package("rtdl_revisiting_models")
    torch.manual_seed(0)
    sizes = {"d_block": 6, "d_hidden": 8, "d_hidden_multiplier": None}
    model = models.ResNet(d_in=4, d_out=3, n_blocks=2, dropout1=0.0, dropout2=0.0, **sizes)
    x = numbers(7, 4)
    return made(settled(model, x), x)


@of_package
def convolutions_of_pytorch_tcn() -> Made:
    """Dilated causal convolutions without their norm of weights."""
    tcn = package("pytorch_tcn")
    torch.manual_seed(0)
    model = tcn.TCN(2, [4, 4], kernel_size=2, use_norm=None, dropout=0.0)
    return made(reads(model, lambda m, x: m(x)[:, :, -1]), numbers(6, 2, 6))


@of_package
def weight_norm_of_pytorch_tcn() -> Made:
    """And with it: lengths and directions of weights apart."""
    tcn = package("pytorch_tcn")
    torch.manual_seed(0)
    sizes = {"kernel_size": 2, "dropout": 0.0, "activation": "tanh"}
    model = tcn.TCN(2, [3], use_norm="weight_norm", **sizes).double().eval()
    plain = tcn.TCN(2, [3], use_norm=None, **sizes).double().eval()
    with torch.no_grad():
        for name, value in plain.named_parameters():
            owner, _, kind = name.rpartition(".")
            value.copy_(getattr(model.get_submodule(owner), kind))

    def last(m: Any, x: Tensor) -> Tensor:
        return m(x)[:, :, -1]

    return made(reads(model, last), numbers(5, 2, 5), written=reads(plain, last))


@of_package
def latents_of_perceiver() -> Made:
    """Perceiver: a few latent vectors ask the input."""
    perceiver = package("perceiver_pytorch")
    torch.manual_seed(0)
    sizes = {"num_latents": 3, "latent_dim": 5, "cross_dim_head": 3, "latent_dim_head": 3, "latent_heads": 1}
    model = perceiver.Perceiver(
        num_freq_bands=1, depth=1, max_freq=2.0, input_channels=2, input_axis=1, num_classes=3, **sizes
    )
    return made(reads(model, lambda m, x: m(x)), numbers(5, 4, 2), smooth=True, no_layers=("*latents",))


@of_package
def molecules_of_egnn() -> Made:
    """A network of points that does not mind how they are turned."""
    egnn = package("egnn_pytorch")
    torch.manual_seed(0)
    parts = nn.ModuleList([egnn.EGNN(dim=3, m_dim=4), nn.Linear(3, 2)])
    model = reads(parts, lambda m, h, places: m[1](m[0](h, places)[0].mean(1)))
    # The places that it would move to are dropped here, and with them the network that moves them.
    return made(model, (numbers(4, 5, 3), numbers(4, 5, 3, seed=2)), smooth=True, no_layers=("*coors_mlp*",))
