"""Rules of the sources: what may stand where.

Reads sources only; nothing of tfscale is imported.
"""

import ast
import pkgutil
import re
import subprocess
from pathlib import Path

import pytest

from tests.helpers.sources import CPP, LIBRARY, ROOT, imported_names, parse, relative

FRAMEWORKS = ("tensorflow", "keras", "mpi4py")
# Rooms and modules that start without TensorFlow, Keras and MPI, and are tested without them.
PURE = """
    config files plan launcher native comm/places comm/process trace/chrome trace/stamps
    checkpoints/files checkpoints/preemption data/slices measure/analysis measure/compression
    measure/groups measure/growth measure/provenance measure/report measure/theta monitor
    transparent/__main__ tune/__init__ testing
    """

# The fields of tfscale.config.Settings; each is read from TFSCALE_ and its name in capitals.
SETTINGS = """
    backend stall_warning_s stall_shutdown_s chunk_bytes window_bytes host_memory
    reduce_threads pin_core ranks_per_host set_threads save_timeout_s start_s timeline
    log_level metrics metrics_token compare_averages
    """


def module_of(name: str) -> Path | None:
    """Return the file of the library that defines a name such as tfscale.files.sha256."""
    for module in (name, name.rpartition(".")[0]):
        path = ROOT.joinpath(*module.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
    return None


def pure_files() -> list[Path]:
    paths = [ROOT / "tfscale" / room for room in PURE.split()]
    files = [sorted(p.glob("*.py")) if p.is_dir() else [p.with_suffix(".py")] for p in paths]
    return [file for each in files for file in each]


def test_pure_modules_import_no_framework():
    """Neither do the modules that they import at their top."""
    frameworks: dict[Path, set[str]] = {}

    def needed_by(file: Path) -> set[str]:
        if file not in frameworks:
            frameworks[file] = set()
            names = [*imported_names(file, in_functions=False)]
            tops = {name.split(".")[0] for name in names}
            inner = [needed_by(path) for name in names if (path := module_of(name))]
            frameworks[file] = set().union(tops & set(FRAMEWORKS), *inner)
        return frameworks[file]

    assert {relative(file): found for file in pure_files() if (found := needed_by(file))} == {}


# Tests import public modules, those with which one writes an exchange of one's own
# (docs/architecture.md), and pure ones.
PUBLIC = """
    tfscale/__init__ tfscale/callbacks/__init__ tfscale/checkpoints/__init__ tfscale/data/__init__
    tfscale/keras tfscale/optimizer/futures tfscale/ray/__init__
    tfscale/comm/backends/base tfscale/exchange/base tfscale/exchange/plan
    """
# Other modules, each with the tests that import it.
DIRECT = {
    "callbacks/synchronize": "parallel/cases_adapted_layers parallel/cases_agreement"
    " parallel/cases_callbacks parallel/cases_checkpoint parallel/cases_cycles_end"
    " unit/test_callback_order unit/test_callbacks_synchronize",
    # What is not here: GPUs, Horovod, other clocks and cores, little memory, forks, slow links.
    "callbacks/epoch_measures": "parallel/cases_verify unit/test_memory_guard",
    "comm/backends/engine": "unit/test_config unit/test_library unit/test_merge_op"
    " unit/test_native unit/test_plan_engine",
    "comm/backends/horovod": "unit/test_horovod_values",
    "comm/eager": "unit/test_horovod_values",
    "comm/objects": "unit/test_broadcast_messages",
    "comm/runtime": "helpers/grid_exchange unit/test_checkpoint_faults",
    "comm/warnings": "parallel/cases_warnings",
    "start": "unit/test_checkpoint_faults unit/test_launch unit/test_library",
    "trace/events": "parallel/cases_trace unit/test_trace_files",
    "trace/timeline": "parallel/cases_trace unit/test_trace_files",
    "fit/uneven_batches": "unit/test_fit_session unit/test_horovod_values",
    # Decisions from measured times, where the times are given.
    "callbacks/adaptive_batch_size": "unit/test_callbacks_errors",
    "callbacks/batch_size_schedule": "unit/test_callbacks_errors",
    "exchange/auto": "parallel/cases_auto_sharded unit/test_auto_exchange unit/test_exchange_plans",
    "measure/auto": "parallel/cases_auto_sharded unit/test_auto_exchange unit/test_plan_contention",
    "measure/batch_size": "unit/test_batch_size unit/test_growth unit/test_provenance",
    "measure/layer_times": "unit/test_auto_exchange unit/test_plan_contention",
    "measure/model_layers": "parallel/cases_tune unit/test_forecast",
    "tune/links": "parallel/cases_tune unit/test_auto_exchange unit/test_tune_links",
    "tune/scripts": "parallel/cases_tune unit/test_batch_size unit/test_tune_groups",
    # Checkpoints that are damaged, unfinished or of other jobs, and what resumed runs compare.
    "checkpoints/resumable": "unit/test_checkpoint_state",
    "checkpoints/saver": "unit/test_checkpoint unit/test_checkpoint_files",
    "checkpoints/snapshot_restore": "parallel/resume_cases unit/test_checkpoint_files"
    " unit/test_checkpoint_state",
    "checkpoints/variables": "unit/test_callbacks_synchronize unit/test_checkpoint_files"
    " unit/test_optimizer_settings",
    "data/dataset_batches": "unit/test_dataset_batches",
    "data/global_batches": "unit/test_checkpoint unit/test_checkpoint_state",
    "fit/agreement": "unit/test_checkpoint_state"
    " unit/test_global_batches_records"
    " unit/test_optimizer_settings",
    "fit/batches": "unit/test_batches",
    "internals/row_maps": "unit/test_row_maps",
    "transparent/differences": "unit/test_step_differences",
    "transparent/tables": "unit/test_transparent_program",
    "transparent/verify": "parallel/cases_verify unit/test_step_differences",
    # Adaptations of Keras and TensorFlow, which differ between their versions.
    "callbacks/learning_rate": "unit/test_callbacks_learning_rate",
    "callbacks/local_models": "unit/test_local_sgd",
    "local_sgd/reports": "unit/test_sparse_compression",
    "callbacks/model_checkpoint": "unit/test_callbacks_rank_zero",
    "exchange/dense": "unit/test_chunks",
    "exchange/residuals": "unit/test_checkpoint_state unit/test_residuals",
    "exchange/states": "unit/test_checkpoint_state",
    "fit/session": "unit/test_fit_session",
    "internals/datasets": "unit/test_dataset_batches",
    "internals/keras": "unit/test_checkpoint_state",
    "internals/optimizers": "unit/test_optimizer_settings",
    "internals/stack": "unit/test_checkpoint",
    "internals/trace": "unit/test_chunks unit/test_futures unit/test_metric_updates",
    "optimizer/distributed": "unit/test_optimizer",
    "optimizer/saving": "parallel/cases_distribute parallel/cases_saving"
    " parallel/cases_sharded_saving"
    " unit/test_callbacks_rank_zero",
}


def test_tests_use_public_names():
    known = {ROOT / f"{name}.py" for name in PUBLIC.split()} | {*pure_files()}
    wrong, direct = set(), set()
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for name in imported_names(path):
            module = module_of(name) if name.split(".")[0] == "tfscale" else None
            is_private = re.fullmatch(r"_[a-zA-Z].*", name.rpartition(".")[2])
            if module is None or (module in known and not is_private):
                continue
            place = relative(module).removeprefix("tfscale/").removesuffix(".py")
            test = relative(path).removeprefix("tests/").removesuffix(".py")
            direct.add((place, test))
            if test not in DIRECT.get(place, "").split() or is_private:
                wrong.add(f"{relative(path)} imports {name}")
    assert sorted(wrong) == []
    assert {(p, t) for p, tests in DIRECT.items() for t in tests.split()} == direct


def replaced_names(path: Path) -> list[str]:
    """The dotted names of the library that a test replaces, from `mock.patch` and `setattr`."""
    return [
        call.args[0].value
        for call in ast.walk(parse(path))
        if isinstance(call, ast.Call)
        and ast.unparse(call.func).endswith(("patch", "setattr"))
        and call.args
        and isinstance(call.args[0], ast.Constant)
        and str(call.args[0].value).startswith("tfscale.")
    ]


def test_what_tests_replace_is_there():
    """Those on several ranks run last: a name that has moved is told here."""
    names = {name for path in (ROOT / "tests").rglob("*.py") for name in replaced_names(path)}
    assert names
    for name in sorted(names):
        pkgutil.resolve_name(name)


def test_native_code_layers():
    """`comm` knows no TensorFlow, `tf` names no <mpi.h>."""
    wrong = []
    for path in CPP:
        pattern = r"(mpi\.h)" if path.parent.name == "tf" else r"(tensorflow/|tsl/|tf/)"
        found = re.findall(rf'#include\s+[<"]{pattern}', path.read_text())
        wrong += [f"{relative(path)} includes {name}" for name in found]
    assert not wrong


# What stands in the named files only, and what is wrong elsewhere.
PLACES = [
    (r"os\.(environ|getenv|putenv)\b", {"config.py"}, "config.py reads environment variables"),
    (r"\b(_getframe|currentframe|f_back|f_locals)\b", {"internals/stack.py"}, "reading the stack"),
    (r"raise NotImplementedError|\bTODO(?!\(#\d+\))", set(), "a TODO names an issue"),
    (r"(?m)^\s*from \.", set(), "imports are absolute"),
]


@pytest.mark.parametrize(("pattern", "places", "rule"), PLACES, ids=[rule for *_, rule in PLACES])
def test_words_with_a_place(pattern, places, rule):
    found = {relative(path) for path in LIBRARY if re.search(pattern, path.read_text())}
    assert found == {f"tfscale/{place}" for place in places}, rule


def test_the_library_does_not_print():
    wrong = [
        f"{relative(path)}:{node.lineno}"
        for path in LIBRARY
        if path.name != "cli.py"
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print"
    ]
    assert not wrong, "use logging (absl.logging)"


def test_no_path_of_a_machine():
    """Tracked files name no folder of their authors."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode != 0:
        pytest.skip("no git checkout")
    pattern = re.compile(r"(?<![\w.$}])/(work|root|home|Users|mnt|tmp/[a-z])/[\w.-]+")
    wrong = []
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if not path.is_file() or path == Path(__file__).resolve():
            continue
        try:
            found = pattern.search(path.read_text())
        except UnicodeDecodeError:
            continue
        if found:
            wrong.append(f"{name}: {found.group()}")
    assert not wrong


COLLECTIVES = {
    "collectives": "allgather allreduce alltoall barrier broadcast grouped_allgather"
    " grouped_allreduce grouped_reducescatter reducescatter",
    "objects": "allgather_object broadcast_object broadcast_variables",
}


def test_collectives_say_that_all_ranks_must_call_them():
    wrong = []
    for module, names in COLLECTIVES.items():
        public = {
            node.name: ast.get_docstring(node) or ""
            for node in parse(ROOT / "tfscale" / "comm" / f"{module}.py").body
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
        }
        for name in names.split():
            texts = ("Collective: all ranks", "Args:", "Raises:", "ExchangeError:")
            same = re.search(r"Arguments and\s+errors are those of `(\w+)`", public[name])
            told = public[name] + (public[same[1]] if same else "")
            wrong += [f"{module}.{name}: {text}" for text in texts if text not in told]
    assert not wrong


def test_settings_are_a_frozen_list():
    """A new setting is a decision: it is listed here, documented in Settings and in docs/."""
    tree = parse(ROOT / "tfscale" / "config.py")
    settings = next(n for n in tree.body if getattr(n, "name", "") == "Settings")
    fields = tuple(n.target.id for n in settings.body if isinstance(n, ast.AnnAssign))
    assert fields == tuple(SETTINGS.split())
    documented = ast.get_docstring(settings) or ""
    assert [f for f in fields if f"TFSCALE_{f.upper()}" not in documented] == []
    table = (ROOT / "docs" / "settings.md").read_text()
    assert [f for f in fields if f"| `TFSCALE_{f.upper()}` |" not in table] == []


def test_the_library_is_compiled_by_one_target():
    """Two of them at once, under make -j, would write the same objects."""
    text = (ROOT / "Makefile").read_text()
    needs = dict(re.findall(r"^([\w-]+): (.*)$", text, re.MULTILINE))
    assert "build" in needs["wheel"].split() and "build" in needs["horovod"].split()


def test_versions_agree():
    """The tested versions stand in one place; metadata, pages and `make test-versions` follow."""
    compiler = parse(ROOT / "tfscale" / "native" / "compiler.py")
    (value,) = (
        node.value
        for node in compiler.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "TESTED"
    )
    tensorflow, keras = ast.literal_eval(value).values()
    project = (ROOT / "pyproject.toml").read_text()
    assert f'"tensorflow>={tensorflow[0]}",' in project and f'"keras>={keras[0]}",' in project
    text = f"TensorFlow {' to '.join(tensorflow)} with Keras {' to '.join(keras)}"
    for page in ("README.md", "docs/install.md"):
        assert text in (ROOT / page).read_text(), page
    tool = (ROOT / "tools" / "test_versions.py").read_text()
    for versions in zip(tensorflow, keras, strict=True):
        assert '("tensorflow=={}.*", "keras=={}.*")'.format(*versions) in tool


INTERNALS = "tfscale/internals/"
# Of namedtuples, argparse and os.
NOT_KERAS = {"_asdict", "_replace", "_exit", "_SubParsersAction"}
# Methods that Keras and TensorFlow call on classes of tfscale, which stand where their work is.
CALLED_BY_KERAS = {
    "_save_model": "tfscale/callbacks/model_checkpoint.py",
    "_restore_from_tensors": "tfscale/optimizer/futures.py",
    "_direct_assign": "tfscale/optimizer/futures.py",
    "_serialize_to_tensors": "tfscale/exchange/tables.py",
}
PATCHED = {
    *("call", "export", "fit", "make_train_function", "save", "save_weights", "train_step"),
    *("_save_model", "__class__"),
}


def own_names(path: Path) -> set[str]:
    """Return the names that classes, functions and assignments of a module define."""
    own = set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            own |= {node.attr} if getattr(node.value, "id", "") in ("self", "cls") else set()
    return own


def private_names_of_others(path: Path, everywhere: set[str]) -> set[str]:
    """Return private modules that a file imports, and private names that it takes from objects.

    Those of `self` may be defined in another module of the library, in a base class (they are among
    `everywhere`), those of other objects in this one.
    """
    own, found = own_names(path), set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            named = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
            found |= {n for n in named if re.match(r"(keras\.src|tensorflow\.\w+)\b", n)}
        if not isinstance(node, ast.Attribute) or not re.match(r"_(?!_|self_)", node.attr):
            found |= {"__internal__"} if getattr(node, "attr", "") == "__internal__" else set()
            continue
        is_self = getattr(node.value, "id", "") in ("self", "cls")
        if node.attr not in NOT_KERAS | own | (everywhere if is_self else set()):
            found.add(node.attr)
    return found


def listed_private_names() -> set[str]:
    """Return the private names of Keras and TensorFlow that docstrings of internals/ list."""
    documented = (
        ast.get_docstring(parse(p)) or "" for p in sorted((ROOT / INTERNALS).glob("*.py"))
    )
    return {name for text in documented for name in re.findall(r"[`.](_[a-z]\w+)", text)}


def test_the_session_of_a_fit_is_found_once():
    """Others get it as an argument, or as the attribute of a callback."""
    allowed = {"fit/session.py", "data/global_batches.py", "comm/warnings.py"}
    found = {
        relative(path)
        for path in LIBRARY
        if any(n.startswith("tfscale.internals.stack") for n in imported_names(path))
    }
    assert {f for f in found if not f.startswith(INTERNALS)} == {f"tfscale/{f}" for f in allowed}


def test_private_names_of_keras_and_tensorflow_stand_in_one_place():
    everywhere = {name for path in LIBRARY for name in own_names(path)}
    outside = [p for p in LIBRARY if not relative(p).startswith((INTERNALS, "tfscale/testing/"))]
    found = {relative(p): n for p in outside if (n := private_names_of_others(p, everywhere))}
    assert not found
    listed = ast.get_docstring(parse(ROOT / INTERNALS / "keras.py")) or ""
    names = private_names_of_others(ROOT / INTERNALS / "keras.py", everywhere)
    assert [n for n in names if n.rpartition(".")[2] not in listed] == []


def test_private_methods_of_keras_are_overridden_in_one_place():
    """Classes with bases of Keras, or none, define no private method of it: it would be called."""
    private = listed_private_names()
    for path in LIBRARY:
        if relative(path).startswith(INTERNALS):
            continue
        for node in ast.walk(parse(path)):
            bases = [ast.unparse(base) for base in getattr(node, "bases", [])]
            if isinstance(node, ast.ClassDef) and any(re.match(r"(keras|tf)\.", b) for b in bases):
                methods = {f.name for f in node.body if isinstance(f, ast.FunctionDef)}
                overridden = {
                    n for n in methods & private if CALLED_BY_KERAS.get(n) != relative(path)
                }
                assert not overridden, f"{relative(path)}: {overridden}"
            is_text = isinstance(node, ast.Constant) and node.value in private
            # "_model" is the end of keras.saving.save_model, too.
            assert not is_text or node.value == "_model", f"{relative(path)}: {node.value}"


def test_attributes_are_set_by_name_in_one_place():
    """`setattr` and mocks are patches, except on `self` and on classes of the same module.

    `checkpoints/resumable.py` gives callbacks their public numbers back.
    """
    allowed = {"tfscale/checkpoints/resumable.py"}
    for path in LIBRARY:
        if relative(path).startswith((INTERNALS, "tfscale/testing/")):
            continue
        tree = parse(path)
        own = {"self"} | {n.name for n in ast.walk(tree) if isinstance(n, ast.ClassDef)}
        owners = [
            ast.unparse(node.args[0])
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("setattr", "delattr")
        ]
        assert set(owners) <= own or relative(path) in allowed, f"{relative(path)}: {owners}"
        assert not [n for n in imported_names(path) if n.startswith("unittest")], relative(path)


def test_objects_of_keras_are_patched_in_one_place():
    found: dict[str, list[str]] = {}
    for path in LIBRARY:
        for node in ast.walk(parse(path)):
            for target in getattr(node, "targets", []) if isinstance(node, ast.Assign) else []:
                name = ""
                if isinstance(target, ast.Attribute) and target.attr in PATCHED:
                    is_own = isinstance(target.value, ast.Name) and target.value.id == "self"
                    name = "" if is_own else target.attr
                elif isinstance(target, ast.Subscript) and "__dict__" in ast.unparse(target.value):
                    name = getattr(target.slice, "value", "a name")
                    name = "" if ast.unparse(target.value).startswith("self.") else name
                if name:
                    found.setdefault(relative(path), []).append(name)
    assert not {path: names for path, names in found.items() if not path.startswith(INTERNALS)}


# Attributes that another object than the one that has them may set: public properties meant for it
# (of a learning rate, a batch size, an epoch), functions that are given a name or what they wrap,
# and what Python, argparse and Keras keep in fields.
SET_BY_OTHERS = {
    *("batch_size", "epoch", "learning_rate"),
    *("__doc__", "__name__", "plain_step"),
    *("argv", "constraint", "daemon", "excepthook", "inner_optimizer", "seed"),
    *("apply_default_optimizations", "enabled", "private_threadpool_size"),  # options of tf.data
}


def foreign_writes(path: Path) -> set[str]:
    """Return the attributes of other objects than `self` that a file's functions set."""
    found = set()
    for function in ast.walk(parse(path)):
        if not isinstance(function, ast.FunctionDef):
            continue
        nodes = list(ast.walk(function))
        assigned = [n for n in nodes if isinstance(n, ast.Assign | ast.AugAssign | ast.AnnAssign)]
        made = {
            target.id
            for node in assigned
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in assigned:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                for part in getattr(target, "elts", [target]):
                    if isinstance(part, ast.Attribute):
                        owner = part.value
                        is_own = isinstance(owner, ast.Name) and owner.id in {"self", "cls"} | made
                        found |= set() if is_own else {part.attr}
    return found


def test_objects_are_not_edited_by_others():
    found = {
        relative(path): names
        for path in LIBRARY
        if not relative(path).startswith((INTERNALS, "tfscale/testing/"))
        and (names := foreign_writes(path) - SET_BY_OTHERS)
    }
    assert not found


def test_only_its_room_asks_for_local_sgd():
    """Others ask an exchange for what they need: `trains_apart`, `form_groups`, `refuse`."""
    for path in LIBRARY:
        if relative(path).startswith("tfscale/local_sgd/"):
            continue
        asked = [
            ast.unparse(node)
            for node in ast.walk(parse(path))
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "type")
        ]
        assert not [text for text in asked if "LocalSGD" in text], relative(path)


def test_the_distributed_optimizer_stays_small():
    path = ROOT / "tfscale" / "optimizer" / "distributed.py"
    classes = [node for node in parse(path).body if isinstance(node, ast.ClassDef)]
    (optimizer,) = [node for node in classes if node.name == "DistributedOptimizer"]
    methods = [node.name for node in optimizer.body if isinstance(node, ast.FunctionDef)]
    stored = {
        node.attr
        for node in ast.walk(optimizer)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and node.attr.startswith("_self_")
    }
    assert len(methods) <= 32, methods
    assert len(stored) <= 4, stored


# What has a state between steps, by the names under which others reach it.
KEEPERS = {
    *("accumulator", "average", "bound", "executor", "kept", "nonfinite", "residuals", "shards"),
    *("Accumulator", "Bound", "GroupAverage", "KeptState", "NonFinite", "Residuals", "Shards"),
}


def test_checkpoints_know_no_state_by_name():
    """Objects with a state have `saved` and `restored`; a snapshot is a loop over them."""
    for path in sorted((ROOT / "tfscale" / "checkpoints").glob("*.py")):
        nodes = list(ast.walk(parse(path)))
        used = {n.attr for n in nodes if isinstance(n, ast.Attribute)}
        used |= {n.id for n in nodes if isinstance(n, ast.Name)}
        used |= {name.rpartition(".")[2] for name in imported_names(path)}
        assert not used & KEEPERS, relative(path)
    tree = parse(ROOT / "tfscale" / "checkpoints" / "snapshot_restore.py")
    (take,) = [n for n in tree.body if getattr(n, "name", "") == "take_snapshot"]
    assert take.end_lineno - take.lineno + 1 <= 30


def test_ranks_are_compared_in_one_place():
    """`objects.require_equal` names the ranks that differ, and what they have."""
    texts = ("All ranks must have the same", "All ranks must train", "same on all ranks. Received")
    found = {relative(p) for p in LIBRARY if any(text in p.read_text() for text in texts)}
    assert found == {"tfscale/comm/objects.py"}


def test_how_a_gradient_is_exchanged_is_one_type():
    """`plan.buckets.Kind` has the words; only an option of users repeats some of them."""
    words = {"allreduce", "weights", "replicated", "partial"}
    found = {
        relative(path)
        for path in LIBRARY
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Subscript) and getattr(node.value, "id", "") == "Literal"
        if len(words & {n.value for n in ast.walk(node.slice) if isinstance(n, ast.Constant)}) > 1
    }
    assert found == {"tfscale/plan/buckets.py", "tfscale/exchange/sharded.py"}


def test_weak_dictionaries_of_modules_stand_in_a_list():
    """State beside the arguments of a function is a channel that no reader sees."""
    found = {
        (relative(path), match)
        for path in LIBRARY
        for match in re.findall(r"(?m)^(\w+)\b.*\bWeak\w+\b", path.read_text())
        if match not in ("from", "import", "class", "def")
    }
    assert found == {
        ("tfscale/data/dataset_batches.py", "_served"),
        ("tfscale/fit/metric_updates.py", "_watches"),
        ("tfscale/fit/session.py", "_sessions"),
        ("tfscale/internals/trace.py", "_contexts"),
    }


PAGES = ("README.md", "CONTRIBUTING.md", "recipes/README.md")


def _code(text):
    """Return the code of a page in Markdown: blocks, indented lines, and spans, a line each."""
    blocks = re.findall(r"^```\w*\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    rest = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    indented = re.findall(r"^    +(\S.*)$", rest, re.MULTILINE)
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", rest)]
    return "\n".join([*blocks, *indented, *spans])


@pytest.mark.parametrize(
    "page",
    [*(ROOT / name for name in PAGES), *sorted((ROOT / "docs").glob("**/*.md"))],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_commands_of_documents_are_there(page):
    """Numbers are worth as much as the command that makes them."""
    code, targets = _code(page.read_text()), (ROOT / "Makefile").read_text()
    modules = re.findall(r"python -m ((?:benchmarks|tools|tests|tfscale)[\w.]*)", code)
    files = re.findall(r"python ((?:recipes|tools|benchmarks)/[\w/]+\.py)", code)
    wanted = re.findall(r"^(?:sudo )?make ([a-z][a-z-]*)", code, re.MULTILINE)
    paths = [ROOT / name.replace(".", "/") for name in modules]
    wrong = [p.name for p in paths if not (p.with_suffix(".py").exists() or p.is_dir())]
    wrong += [name for name in files if not (ROOT / name).exists()]
    target = r"^(?:[\w-]+ )*{}(?: [\w-]+)*:"
    wrong += [n for n in wanted if not re.search(target.format(n), targets, re.MULTILINE)]
    assert not wrong
