"""Intents of Horovod's tests, and the cases that assure our users of the same.

The cases are those of tests/parallel, where they run on the engine with 1 to 4 ranks; here they run
on the Horovod backend. A module without a name of a case stands for all that it has.
"""

from tests.helpers.cases import cases_of

_INTENTS = {
    # Horovod's Keras tests
    "learning rates through a long fit": [
        "optimizer:case_unbuilt_optimizer_and_scheduled_learning_rate",
        "optimizer:case_learning_rate_changes_between_traced_steps",
    ],
    "aggregation, local variables and partial optimizers": ["optimizer_cycles"],
    "broadcast callback": [
        "callbacks:case_last_rank_is_root",
        "callbacks:case_local_variables_stay_local",
    ],
    "loaded models, sparse gradients, process sets, equal ranks after fit": ["horovod"],
    "metrics": [
        "callbacks:case_metrics_equal_one_process",
        "callbacks:case_a_metric_key_of_one_rank_is_an_error_on_all",
    ],
    # Horovod's tests of its ops
    "allreduce, errors that name both ranks": ["collectives_reduce"],
    "allgather, broadcast, alltoall and reducescatter": ["collectives_rows"],
    "sparse allreduce": [
        "collectives_sparse:case_sparse",
        "collectives_sparse:case_sparse_without_rows_on_one_rank",
    ],
    "compression": ["collectives_sparse:case_compression", "optimizer:case_compressed_gradients"],
    "process sets": [
        "collectives_sets:case_process_sets_work_side_by_side",
        "collectives_sets:case_world_and_set_in_one_function",
    ],
    "join": ["collectives_sets:case_join_with_different_numbers_of_steps"],
    "objects and variables": [
        "collectives_sets:case_objects_of_any_size",
        "collectives_sets:case_variables_take_the_values_of_the_root",
    ],
    "synchronised batch normalisation": ["sync_batch_norm:case_uneven_batches_and_masks"],
    # Ours: the same numbers, and the same ends
    "equal to one process": [
        "equality",
        "chunked:case_chunks_equal_one_process",
        "chunked:case_replicated_dense_equals_one_process",
    ],
    # Of each other exchange the fastest case that compares a training with one process; of sharded
    # ones also what only ranks that own nothing, whole variables or state of their own can break.
    "sharded exchange equal to one process": [
        "sharded:case_sizes_of_buckets",
        "sharded:case_constraints_and_shared_layers",
        "sharded:case_every_model",
        "sharded_options:case_process_set",
        "sharded_saving:case_save_points_of_rank_0_alone",
        "sharded_dense:case_uneven_local_batches",
    ],
    "local SGD equal to single processes": [
        "local_sgd:case_every_step_with_sgd_is_synchronous",
        "local_sgd:case_callbacks_see_the_average_and_groups_go_on",
    ],
    "growing batches equal to one process": [
        "adaptive:case_growing_batches_equal_one_process",
        "adaptive:case_growing_batches_equal_one_process_in_other_exchanges",
    ],
    "several optimizers": ["late_ranks:case_two_optimizers_and_delays"],
    "a rank that stops stops all, also of unequal data": [
        "fit:case_one_rank_stops_within_an_epoch_or_at_its_end",
        "fit:case_one_rank_stops_while_running_eagerly",
        "fit:case_terminate_on_nan",
        "fit:case_data_of_unknown_length_runs_out",
    ],
}


def _expand(word: str) -> list[str]:
    """Return a case, or all of a module, without the package."""
    if ":" in word:
        return [word]
    return [name.rpartition(".cases_")[2] for name in cases_of(f"tests.parallel.cases_{word}")]


INTENTS = {
    intent: [c for word in words for c in _expand(word)] for intent, words in _INTENTS.items()
}
