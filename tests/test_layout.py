"""The shape of the source: imports go one way, files are short, what is declared is documented, nothing unsafe."""

from __future__ import annotations

import ast
import functools
import graphlib
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from flatscope.registry import Declaration, declarations

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "flatscope"
TRAINING_SOURCE = SOURCE / "training"
PAPERS_SOURCE = ROOT / "src" / "flatscope_papers"
LONGEST = 400
# From the ground up. A file imports only from levels below its own, or from its own package.
LEVELS = (
    {"errors", "lazy_names", "version"},
    {"cuda_graphs", "disk", "formatting", "formulas", "limits", "significance", "switches"},
    {"definitions"},
    {"registry"},
    {"progress", "isolation", "params", "derived_measures", "stats", "ranks", "langevin", "rows", "network_summary"},
    {"charts", "files", "headlines", "leaks"},
    {"result", "tensor_files"},
    {"samples", "table"},
    {"loss", "sample_digests"},
    {"torch_losses", "target_checks", "sample_sources"},
    {"network"},
    {"first_batch", "input_checks", "sharing"},
    {"problem"},
    {"reading"},
    {"context", "symmetries"},
    {"sampling", "descent"},
    {"curvature", "perturbation"},
    {"ascents"},
    {"planning", "summarising", "forms", "doubts", "searching", "result_rows"},
    {"looking"},
    {"measuring", "simplex"},
    {"audit_result"},
    {"measures"},
    {"generalization_bounds"},
    {"auditing", "explaining", "landscapes", "interpolation", "spectra", "decisions"},
    {"comparing"},
    {"inputs"},
    {"training"},
    {"reports"},
    {"cli"},  # shows what the page shows
    {"extend", "__init__", "__main__"},
)
# Networks in training, likewise.
TRAINING_LEVELS = (
    {"callbacks", "fused_chain", "initialization", "vision_models", "checkpoint", "gpu_steps", "label_noise"},
    {"fused_source", "models", "evaluation", "stacked_layers"},
    {"fused_device", "loop", "trials"},
    {"stack_samples", "stacked_measures", "population_result"},
    {"stack"},
    {"fused_stack"},
    {"group_training"},
    {"population"},
    {"stability", "sweeps", "populations"},
    {"benchmarking"},
    {"__init__"},
)
# The package of the papers, likewise; papers do not import each other.
PAPERS_LEVELS = (
    {"claims", "curves", "smoke_data", "theory"},
    {"rounded_data"},
    {"toml_files"},
    {"correlation_intervals", "contradiction_notes", "stratified", "study_result", "declaration"},
    {"intervals"},
    {"fitting"},
    {"neyshabur2017", "petzka2019", "yi2019", "zhang2017"},
    {"study_registry", "one_by_one"},
    {"read_only_store", "reproduction"},
    {"study_runs"},
    {"rejudging"},
    {"pages"},
    {"report_section"},
    {"study_commands"},
    {"__init__"},
)
# A package imports those before it, and no other.
PACKAGES = ("flatscope", "flatscope_papers")
ALL_LEVELS = {"flatscope": LEVELS, "flatscope.training": TRAINING_LEVELS, "flatscope_papers": PAPERS_LEVELS}
# What a paper may import of the others is public: names of `flatscope` itself, its errors and its statistics. These
# modules are used beside it for want of a public name. The list grows only when code of the library that nothing but
# the papers uses moves to them.
PUBLIC_MODULES = {
    "flatscope",
    "flatscope.errors",
    "flatscope.extend",
    "flatscope.inputs",
    "flatscope.stats",
    "flatscope.training",
}
USED_INSIDE = {
    "flatscope.cli.output",
    "flatscope.files",
    "flatscope.generalization_bounds.classical",
    "flatscope.generalization_bounds.pac_bayes",
    "flatscope.generalization_bounds.psi",
    "flatscope.measures.feature_robustness",
    "flatscope.measures.gradient_noise",
    "flatscope.measures.interactions",
    "flatscope.measures.pac_bayes",
    "flatscope.symmetries.basis_paths",
}
# Names that stand for two things; to be shortened, never to be added to.
REPEATED_CLASSES: set[str] = set()
REPEATED_MODULES = {"pac_bayes"}
# Numbers of one algorithm alone stand with it in `curvature`: steps of differences, tolerances of checks, roundings.
# What decides between ways, or ends draws, is a field of `flatscope.limits.Limits`.
LOCAL_NUMBERS = {
    # In network/: codes, where a softplus is straight, and how far searches and comparisons go.
    "discontinuities": {"_SMOOTH"},
    "program": {"NO_MEMORY"},
    "singular_values": {"TOLERANCE", "ROUGH_TOLERANCE", "ROUGH_BASIS", "BASIS", "MATRIX_TOLERANCE", "MATRIX_BASIS"},
    "tied_labels": {"ZERO", "CONSTANT"},
    "interception": {"_LOW_PRECISION"},
    # In decisions/: what is asked for, and what headlines and pictures show.
    "allocation": {"SOLVER_SCALE"},
    "changes": {"LEAST_BITS", "MOST_BITS"},
    "forecast": {"FAILS", "MOST_NAMED", "WIDE"},
    "sensitivity": {"RESOLVED", "CURVE_POINTS"},
    # In curvature/: numbers of one algorithm, and of the checks.
    "brackets": {"UNSEEN", "ROUNDINGS", "STEPS"},
    "convolutions": {"OUTPUT", "INPUT", "WEIGHT"},
    "coverage": {"CHECKED_SAMPLES"},
    "lanczos": {"SUMMED_TOGETHER"},
    "replayed_products": {"ROUNDINGS", "COARSE_ROUNDING", "LAUNCHING"},
    "checked_pass": {"PROBED_SAMPLES", "CANDIDATES"},
    "hessian_check": {"TOLERANCE", "TOGETHER", "ROUNDING", "NOTHING"},
    "second_derivative": {"ATTEMPTS", "SAMPLES", "SPREADS", "ROUNDING"},
    "random_signs": {"_FIRST", "_SECOND", "_STEP"},
    "linear_systems": {"NOISE"},
    "finite_differences": {"RATIO"},
    # In measures/ and landscapes/: what is asked for, numbers of one search or attack, roundings, pictures.
    "sampling": {"LEVEL"},
    "attacks": {"HALVINGS", "KINDS", "LENGTHS", "POWERS", "ROUNDING", "SAMPLES", "STEPS", "TOLERANCE"},
    "feature_robustness": {"LONGEST", "NO_GRADIENT", "SETTLED", "SETTLING", "TOLERANCE"},
    "geometric_margin": {"ROUNDING", "SURE"},
    "information": {"BELOW", "OUTSIDE"},
    "layer_values": {"MOST_PARTS", "MOST_REASONS"},
    "losses_along_lines": {"FEW"},
    "margin_exact": {"LARGEST_INPUT", "MOST_UNITS", "ROUNDING"},
    "margin_search": {
        "CORNER",
        "DIRECTIONS",
        "DRAW_BACK",
        "FAR",
        "HALVINGS",
        "LOOKS",
        "MOST_CLASSES",
        "OVERSHOOT",
        "ROUNDS",
        "SLIDES",
        "SPREAD",
        "STEPS",
        "SWEEPS",
        "TOWARDS_SAMPLE",
    },
    "pac_bayes": {"ALPHAS", "SLOPE"},
    "posterior_chains": {"CHANCE", "GROWTH", "HEAT", "MOST_ROUNDS", "ROUGH_PRODUCTS"},
    "psi_flatness": {"DRAWS"},
    "radius": {"MOST_STEPS", "SMALLEST", "START", "SUP_GROWTH"},
    "robustness": {"GAMMAS", "IDENTITY", "UNDECIDED"},
    "sharpness": {"EVALUATIONS", "LEAST_CORNERS", "ROUGH_PRODUCTS", "SIGN_STEPS"},
    "weight_flatness": {"AFFORDABLE", "CLOUD"},
    "landscape_function": {"NOISE"},
    "surface": {"FALLS", "LEVELS", "MOST"},
}
# Numbers in comparisons, `min` and `max`: bytes of a float64, roundings, lengths of argument lists.
LOCAL_BOUNDS = {
    "coverage": {100, 0.75},
    "estimators": {8},
    "expansions": {9},
    "finite_differences": {1e-12, 1e-300},
    "linear_systems": {1e-14, 1e-9},
    "second_derivative": {100},
}
SMALL_NUMBERS = {*range(6), 0.5}  # counts of axes and arguments
MOST_HIDDEN_IMPORTS = 4
EMPTY_WORDS = {"utils", "util", "helpers", "helper", "common", "misc", "core", "impl", "settings"}
OPTIONAL = (
    "ray",
    "pooch",
    "playwright",
    "requests",
    "lightning",
    "transformers",
    "datasets",
    "tensorboard",
    "mlflow",
    "wandb",
)

LIBRARY_FILES, PAPERS_FILES = (sorted(folder.rglob("*.py")) for folder in (SOURCE, PAPERS_SOURCE))
TRAINING_FILES = sorted(TRAINING_SOURCE.rglob("*.py"))
FILES = LIBRARY_FILES + PAPERS_FILES


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """The parsed file; made once for all checks."""
    return ast.parse(path.read_text())


def package_of(path: Path) -> str:
    """`flatscope`, or the package beside it."""
    return path.relative_to(SOURCE.parent).parts[0]


def module_name(path: Path) -> str:
    """Dotted name below the package: `curvature.sweep`; a package's own file has the package's name."""
    parts = path.relative_to(SOURCE.parent / package_of(path)).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {f"{package_of(path)}.{module_name(path)}": path for path in FILES}


@functools.cache
def import_nodes(tree: ast.AST) -> list[ast.Import | ast.ImportFrom]:
    """All imports of a file; looked for once."""
    return [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]


def imports(tree: ast.AST, package: str = "flatscope") -> Iterator[tuple[int, str]]:
    """(line, module below the package) of every import of the package: in functions and for type checking too."""
    for node in import_nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if within(alias.name, package):
                    yield node.lineno, alias.name.removeprefix(package).removeprefix(".") or "__init__"
        elif node.level:
            yield node.lineno, "a relative import"
        elif within(node.module or "", package):
            below = (node.module or "").removeprefix(package).removeprefix(".")
            for alias in node.names:
                longer = f"{below}.{alias.name}".removeprefix(".")
                yield node.lineno, longer if f"{package}.{longer}" in MODULES else below or "__init__"


def within(module: str, package: str) -> bool:
    """Whether a module is the package or lies in it."""
    return module == package or module.startswith(f"{package}.")


def level(name: str, package: str = "flatscope") -> int:
    top = name.split(".")[0]
    found = [number for number, names in enumerate(ALL_LEVELS[package]) if top in names]
    assert found, f"{top} has no place in the levels of {package}: say there what it stands on"
    return found[0]


def wrong_imports(name: str, tree: ast.AST, package: str = "flatscope") -> list[str]:
    """Imports that do not go down; the package's own `__init__` is above all, so nothing may import from it."""
    wrong = []
    for line, target in imports(tree, package):
        own = target.split(".")[0] == name.split(".")[0]
        if not own and level(target, package) >= level(name, package):
            wrong.append(f"line {line}: {name} imports {target}")
    above = PACKAGES[PACKAGES.index(package) + 1 :] if package in PACKAGES else ()
    wrong += [f"line {line}: {name} imports {other}" for other in above for line, _ in imports(tree, other)]
    return wrong


def inner_imports(tree: ast.AST) -> set[str]:
    """Modules of the other packages that are imported although they are not public."""
    public = {
        node.lineno for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module in PUBLIC_MODULES
    }
    return {
        f"flatscope.{target}".removesuffix(".__init__")
        for line, target in imports(tree, "flatscope")
        if line not in public
    } - PUBLIC_MODULES


@functools.cache
def calls(tree: ast.AST) -> list[tuple[ast.Call, str]]:
    """Every call with the name that is called, as written: `torch.load`."""
    return [(node, ast.unparse(node.func)) for node in ast.walk(tree) if isinstance(node, ast.Call)]


def unsafe_calls(tree: ast.AST) -> list[str]:
    """Calls that could run what a file contains."""
    found = []
    safe = {"torch.load": ("weights_only", "True"), "np.load": ("allow_pickle", "False")}
    safe["numpy.load"] = safe["np.load"]
    for call, name in calls(tree):
        given = [(keyword.arg, ast.unparse(keyword.value)) for keyword in call.keywords if name in safe]
        if name in ("eval", "exec", "pickle.load", "pickle.loads") or (name in safe and safe[name] not in given):
            found.append(f"line {call.lineno}: {name}")
    return found


def test_imports_go_one_way() -> None:
    wrong = {str(path): wrong_imports(module_name(path), tree_of(path), package_of(path)) for path in FILES}
    for path in TRAINING_FILES:
        inside = module_name(path).removeprefix("training").removeprefix(".") or "__init__"
        wrong[str(path)] += wrong_imports(inside, tree_of(path), "flatscope.training")
    assert {path: found for path, found in wrong.items() if found} == {}


def repeated(names: Iterable[tuple[str, str]]) -> set[str]:
    """Names that stand for more than one thing, of (name, place)."""
    places: dict[str, set[str]] = {}
    for name, place in names:
        places.setdefault(name, set()).add(place)
    return {name for name, found in places.items() if len(found) > 1}


def classes(paths: Iterable[Path]) -> Iterator[tuple[str, str]]:
    for path in paths:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                yield node.name, f"{path}:{node.lineno}"


def modules(paths: Iterable[Path]) -> Iterator[tuple[str, str]]:
    """Modules by the last part of their name, packages by the name of their folder."""
    for path in paths:
        yield (path.parent.name if path.stem == "__init__" else path.stem), str(path)


def test_no_two_classes_or_modules_have_one_name() -> None:
    """The lists only get shorter: a name that is no longer repeated has to leave them."""
    assert repeated(classes(FILES)) == REPEATED_CLASSES
    assert repeated(modules(FILES)) == REPEATED_MODULES
    assert repeated([("Estimate", "a.py"), ("Estimate", "b.py"), ("Table", "a.py")]) == {"Estimate"}


def test_few_imports_of_our_own_hide_inside_functions() -> None:
    """Each one hides what a module stands on; only commands have one each, so that their help is quick."""
    hidden = {
        f"{module_name(path)}, line {line}"
        for path in LIBRARY_FILES
        if module_name(path) != "cli.commands"
        for function in ast.walk(tree_of(path))
        if isinstance(function, ast.FunctionDef)
        for package in PACKAGES
        for line, _ in imports(function, package)
    }
    assert len(hidden) <= MOST_HIDDEN_IMPORTS, sorted(hidden)


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_imports_itself_by_detours(package: str) -> None:
    graph = {
        module_name(path): {t for _, t in imports(tree_of(path), package) if t != module_name(path)}
        for path in FILES
        if package_of(path) == package
    }
    assert list(graphlib.TopologicalSorter(graph).static_order())


def test_papers_use_no_more_of_the_others_inside_than_is_listed() -> None:
    used = set().union(*(inner_imports(tree_of(path)) for path in PAPERS_FILES))
    assert used == USED_INSIDE, "take what is no longer used off the list; use public names instead of adding to it"


def test_files_are_short_and_named_for_what_they_hold() -> None:
    lengths = {str(path): len(path.read_text().splitlines()) for path in FILES}
    assert {path: length for path, length in lengths.items() if length > LONGEST} == {}
    assert [path for path in FILES if EMPTY_WORDS & set(path.stem.strip("_").split("_"))] == []


def test_nothing_is_unpickled_evaluated_or_printed() -> None:
    unsafe = {str(path): unsafe_calls(tree_of(path)) for path in FILES}
    assert {path: found for path, found in unsafe.items() if found} == {}
    # Results belong to the caller, progress and notes to stderr: only commands print.
    silent = [path for path in FILES if path.parent.name != "cli"]
    printing = [f"{path}:{call.lineno}" for path in silent for call, name in calls(tree_of(path)) if name == "print"]
    assert printing == []


def test_the_checks_above_find_what_they_look_for() -> None:
    upward = "def f():\n    from flatscope.comparing import decision\nif TYPE_CHECKING:\n    import flatscope.context\n"
    assert len(wrong_imports("problem", ast.parse(upward))) == 2
    assert wrong_imports("problem", ast.parse("from flatscope import Table"))
    assert wrong_imports("problem", ast.parse("from flatscope.errors import InputError")) == []
    assert wrong_imports("curvature.sweep", ast.parse("from flatscope.curvature import probe")) == []
    assert wrong_imports("problem", ast.parse("def f():\n    import flatscope_papers.declaration"))
    assert wrong_imports("problem", ast.parse("if TYPE_CHECKING:\n    from flatscope.training import loop"))
    assert wrong_imports("problem", ast.parse("def f():\n    from flatscope.cli import main"))
    assert wrong_imports("training.loop", ast.parse("import flatscope_papers.declaration"))
    assert wrong_imports("training.loop", ast.parse("from flatscope.cli import output"))
    assert wrong_imports("reports.page", ast.parse("from flatscope.cli import output"))
    assert wrong_imports("loop", ast.parse("from flatscope.training.stack import Stack"), "flatscope.training")
    assert wrong_imports("__init__", ast.parse("from flatscope_papers import study"))
    assert wrong_imports("claims", ast.parse("from flatscope_papers.declaration import Study"), "flatscope_papers")
    assert wrong_imports("yi2019.a", ast.parse("from flatscope_papers.zhang2017 import b"), "flatscope_papers")
    inner = "from flatscope import stats\nfrom flatscope.context import Context\nimport flatscope.training.sweeps.store"
    assert inner_imports(ast.parse(inner)) == {"flatscope.context", "flatscope.training.sweeps.store"}
    for code in ("torch.load(f)", "torch.load(f, weights_only=False)", "np.load(f)", "pickle.load(f)", "eval(s)"):
        assert unsafe_calls(ast.parse(code)), code
    assert unsafe_calls(ast.parse("torch.load(f, weights_only=True); np.load(f, allow_pickle=False)")) == []


@pytest.mark.parametrize(
    "entry", [*declarations().values(), *declarations("bound").values()], ids=lambda entry: entry.name
)
def test_every_measure_and_bound_is_documented(entry: Declaration) -> None:
    assert entry.summary.endswith((".", "?"))
    assert len(entry.summary) <= 120
    assert entry.symbol
    assert entry.equation
    assert entry.conventions if entry.kind == "measure" else entry.assumptions
    doc = entry.function.__doc__ or ""
    assert [name for name in entry.options if f"{name}:" not in doc] == []


def test_no_file_knows_where_it_was_written() -> None:
    private = ("/wo" + "rk/", "../sha" + "red")
    text_files = [*FILES, *ROOT.glob("tests/**/*.py"), *ROOT.glob("examples/*"), *ROOT.glob("docs/**/*.md")]
    text_files += [*ROOT.glob("*.md"), ROOT / "Makefile", ROOT / "pyproject.toml"]
    found = [str(path) for path in text_files if path.is_file() and any(p in path.read_text() for p in private)]
    assert found == []


BARE_MACHINE = f"""
import importlib.metadata, runpy, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {OPTIONAL}:
            raise ModuleNotFoundError(f"{{name}} is not installed here", name=name)

found = importlib.metadata.distribution

def without_metadata(name):
    if name.partition("_")[0].partition("-")[0] == "flatscope":
        raise importlib.metadata.PackageNotFoundError(name)
    return found(name)

sys.meta_path.insert(0, Blocked())
importlib.metadata.distribution = without_metadata

import torch, flatscope as fs
assert fs.__file__.startswith(sys.argv[1]), fs.__file__
problem = fs.Problem(torch.nn.Linear(3, 2), train=(torch.eye(3), torch.tensor([0, 1, 0])))
assert fs.measure(problem, "hessian_trace")["hessian_trace"] > 0
fs.report(fs.measure(problem, ["margin", "kappa*"]), sys.argv[2])
sys.argv = ["flatscope", "--help"]
runpy.run_module("flatscope", run_name="__main__", alter_sys=True)
"""


@pytest.mark.long
def test_core_runs_from_the_source_without_optional_packages_or_metadata(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", BARE_MACHINE, str(SOURCE), str(tmp_path / "r.html")]
    env = {**os.environ, "PYTHONPATH": str(SOURCE.parent)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert "Usage: " in done.stdout
    assert (tmp_path / "r.html").stat().st_size > 1000


# Who runs a network watched. Structure is recorded by `record`; values come from `Problem.forward` with rules. A trace
# and folding run modules that are no problem's yet, and so does training.
STARTS_A_WATCHED_PASS = {
    "replay": {"problem", "training.fused_chain", "training.gpu_steps", "training.stacked_layers"},
    "replay_for_structure": {"liveness", "pass_recording"},
    "replayed_outputs": {"folding", "tracing"},
    "record": {"normal_form", "problem", "structure"},
    # Inside of a pass, for the operations of the loss, and for networks that are trained together.
    "watched": {"checked_pass", "normal_form_pass", "pass_recording", "training.stacked_layers"},
}


def test_a_watched_pass_begins_in_few_places() -> None:
    found: dict[str, set[str]] = {name: set() for name in STARTS_A_WATCHED_PASS}
    for path in SOURCE.rglob("*.py"):
        place = f"training.{path.stem}" if TRAINING_SOURCE in path.parents else path.stem
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("flatscope.network."):
                for name in found.keys() & {alias.name for alias in node.names}:
                    found[name].add(place)
    assert found == STARTS_A_WATCHED_PASS


def numbers_of(tree: ast.Module) -> set[str]:
    """Names of a module's constants that are numbers, alone or in a row."""
    found = set[str]()
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            numbers = all(isinstance(part, ast.Constant | NUMERIC) for part in ast.walk(node.value))
            texts = any(isinstance(part, ast.Constant) and isinstance(part.value, str) for part in ast.walk(node.value))
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}
            ranges = isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "range"
            found |= names if (numbers and not texts) or ranges else set()
    return {name for name in found if name.isupper()}


NUMERIC = ast.Tuple | ast.BinOp | ast.UnaryOp | ast.operator | ast.unaryop | ast.expr_context


def bounds_of(tree: ast.Module) -> set[float]:
    """Numbers that values are compared with in a module's functions."""
    found = set[float]()
    for node in ast.walk(tree):
        bounding = isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("min", "max")
        if bounding or isinstance(node, ast.Compare):
            numbers = (part.value for part in ast.walk(node) if isinstance(part, ast.Constant))
            found |= {value for value in numbers if type(value) in (int, float)} - SMALL_NUMBERS
    return found


def test_no_number_in_a_comparison_decides_how_curvature_is_found() -> None:
    files = [path for name in ("network", "curvature") for path in sorted((SOURCE / name).glob("*.py"))]
    found = {path.stem: bounds_of(tree_of(path)) for path in files}
    assert {stem: numbers for stem, numbers in found.items() if numbers} == LOCAL_BOUNDS
    assert bounds_of(ast.parse("if n > 4 * max(7, k): f(8)\nwhile n < 0.8 * m: pass")) == {7, 0.8}


def test_what_decides_how_curvature_is_found_stands_in_limits() -> None:
    """No threshold that steers a choice, or ends a loop, is a constant of a module."""
    folders = [SOURCE / name for name in ("network", "curvature", "decisions", "measures", "landscapes")]
    paths = [path for folder in folders for path in folder.glob("*.py") if path.stem != "__init__"]
    files = {path.stem: path for path in [*paths, SOURCE / "perturbation.py", SOURCE / "sampling.py"]}
    assert len(files) == len(paths) + 2, "no two files of one name"
    found = {stem: numbers_of(tree_of(path)) for stem, path in files.items()}
    assert {stem: names for stem, names in found.items() if names} == LOCAL_NUMBERS
    assert numbers_of(ast.parse("A, B = 2, 3 * 4\nC: int = -1\nD = 'x'\nE = range(3)\nF = f(2)")) == set("ABCE")
    readers = [path.stem for path in LIBRARY_FILES if "mem_get_info" in path.read_text()]
    assert readers == ["memory"], "free memory is read in one place"
