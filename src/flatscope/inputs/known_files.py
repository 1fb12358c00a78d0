"""What MNIST, Fashion-MNIST and CIFAR-10 are made of: files, sizes, checksums, publishers. Facts only.

A file is known by its unpacked content, so that it may lie there plain, as gzip, as xz or in a tar archive.
"""

from __future__ import annotations

from dataclasses import dataclass

from flatscope.samples import Split


@dataclass(frozen=True)
class KnownFile:
    """One file of a public set: `size` and `sha256` are those of the unpacked content."""

    name: str
    part: Split
    size: int
    sha256: str


@dataclass(frozen=True)
class Download:
    """A file as its publisher offers it; `checksum` is `algorithm:hex`."""

    name: str
    size: int
    checksum: str


@dataclass(frozen=True)
class PublicSet:
    """A data set that anyone can get. A download goes to the first of its `folders`, under the data root.

    `archives` are tar files that hold all of it; if they say "python", as CIFAR-10's python batches.
    """

    name: str
    title: str
    shape: tuple[int, int, int]
    n_train: int
    n_test: int
    classes: tuple[str, ...]
    files: tuple[KnownFile, ...]
    folders: tuple[str, ...]
    url: str
    downloads: tuple[Download, ...]
    archives: tuple[str, ...] = ()


def _idx_set(
    name: str, title: str, classes: tuple[str, ...], folders: tuple[str, ...], url: str, sums: str
) -> PublicSet:
    """A set in MNIST's four files; `sums`: of each its stem, size and sha256 of the .gz, sha256 of the content."""
    content_sizes = {"train-images": 47040016, "train-labels": 60008, "t10k-images": 7840016, "t10k-labels": 10008}
    files, downloads, words = [], [], iter(sums.split())
    for stem, packed_size, packed_sha256, sha256 in zip(words, words, words, words, strict=True):
        part: Split = "train" if stem.startswith("train") else "test"
        file = f"{stem}-idx3-ubyte" if stem.endswith("images") else f"{stem}-idx1-ubyte"
        files.append(KnownFile(file, part, content_sizes[stem], sha256))
        downloads.append(Download(f"{file}.gz", int(packed_size), f"sha256:{packed_sha256}"))
    shape, counts = (1, 28, 28), (60_000, 10_000)
    return PublicSet(name, title, shape, *counts, classes, tuple(files), folders, url, tuple(downloads))


MNIST = _idx_set(
    "mnist",
    "MNIST",
    tuple("0123456789"),
    ("mnist", "MNIST/raw", "MNIST"),
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    """
    train-images 9912422
    440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609
    ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db
    train-labels 28881
    3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c
    65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5
    t10k-images 1648877
    8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6
    0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7
    t10k-labels 4542
    f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6
    ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2
    """,
)

FASHION_MNIST = _idx_set(
    "fashion-mnist",
    "Fashion-MNIST",
    ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    ("fashion-mnist", "FashionMNIST/raw", "FashionMNIST"),
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    """
    train-images 26421880
    3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84
    c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888
    train-labels 29515
    a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845
    bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9
    t10k-images 4422102
    346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073
    5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b
    t10k-labels 5148
    67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5
    0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34
    """,
)

_CIFAR_SUMS = {
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}

CIFAR10 = PublicSet(
    name="cifar10",
    title="CIFAR-10",
    shape=(3, 32, 32),
    n_train=50_000,
    n_test=10_000,
    classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    files=tuple(
        KnownFile(name, "test" if name.startswith("test") else "train", 30730000, sha256)
        for name, sha256 in _CIFAR_SUMS.items()
    ),
    folders=("cifar-10", "cifar10", "cifar-10-batches-bin", "cifar-10-batches-py"),
    url="https://www.cs.toronto.edu/~kriz/",
    downloads=(Download("cifar-10-binary.tar.gz", 170052171, "md5:c32a1d4ab5d03f1284b67883e8d87530"),),
    archives=("cifar-10-binary.tar.gz", "cifar-10-python.tar.gz"),
)

SETS: dict[str, PublicSet] = {public.name: public for public in (MNIST, FASHION_MNIST, CIFAR10)}
