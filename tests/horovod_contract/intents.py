"""What Horovod's tests assure its users of, and the cases that assure ours of the same.

The cases are those of tests/parallel, where they run on the engine with 1 to 4 ranks; here they run
on the Horovod backend.
"""

INTENTS = {
    # Horovod's Keras tests
    "learning rates through a long fit": [
        "optimizer:case_unbuilt_optimizer_and_scheduled_learning_rate",
        "optimizer:case_learning_rate_changes_between_traced_steps",
    ],
    "sparse gradients made dense": ["horovod:case_sparse_as_dense"],
    "sparse gradients with aggregation": ["horovod:case_sparse_gradients_with_aggregation"],
    "infinity in aggregation": ["optimizer_cycles:case_infinity_of_one_cycle_is_gone_in_the_next"],
    "aggregation with exact values": ["optimizer_cycles:case_aggregation_is_exact"],
    "aggregation with local variables": [
        "optimizer_cycles:case_local_variables",
        "optimizer_cycles:case_all_variables_local",
    ],
    "partial optimizer": ["optimizer_cycles:case_partial_optimizer"],
    "broadcast callback": [
        "callbacks:case_last_rank_is_root",
        "callbacks:case_local_variables_stay_local",
    ],
    "load_model": [
        "horovod:case_load_model_and_go_on",
        "horovod:case_loaded_optimizer_weights_are_broadcast",
    ],
    "process-set optimizer": [
        "horovod:case_process_set_in_fit",
        "optimizer_cycles:case_process_set_of_even_ranks",
    ],
    "fit leaves the ranks equal": [
        "horovod:case_fit_leaves_the_ranks_equal",
        "horovod:case_fit_leaves_ranks_equal_that_begin_differently",
    ],
    "metrics": [
        "callbacks:case_metrics_equal_one_process",
        "callbacks:case_a_metric_key_of_one_rank_is_an_error_on_all",
    ],
    # Horovod's tests of its ops
    "allreduce": [
        "collectives_reduce:case_reductions_of_every_dtype",
        "collectives_reduce:case_average_of_float64_keeps_all_digits",
        "collectives_reduce:case_nan_and_infinity_reach_all_ranks",
        "collectives_reduce:case_factors_before_and_after",
        "collectives_reduce:case_gradient_of_a_reduction",
    ],
    "sparse allreduce": [
        "collectives_sparse:case_sparse",
        "collectives_sparse:case_sparse_without_rows_on_one_rank",
    ],
    "errors name both ranks": ["collectives_reduce:case_differences_name_both_ranks"],
    "grouped allreduce": [
        "collectives_reduce:case_grouped_of_mixed_dtypes",
        "collectives_reduce:case_gradient_of_a_group",
    ],
    "allgather": [
        "collectives_rows:case_allgather",
        "collectives_rows:case_grouped_allgather",
        "collectives_rows:case_gradient_of_allgather",
        "collectives_rows:case_different_widths_and_roots_are_refused",
    ],
    "broadcast": [
        "collectives_rows:case_broadcast_from_every_rank",
        "collectives_rows:case_gradient_of_broadcast",
    ],
    "alltoall": [
        "collectives_rows:case_alltoall",
        "collectives_rows:case_alltoall_that_does_not_add_up",
        "collectives_rows:case_gradient_of_alltoall",
    ],
    "reducescatter": [
        "collectives_rows:case_reducescatter_of_any_number_of_rows",
        "collectives_rows:case_grouped_reducescatter",
        "collectives_rows:case_gradient_of_reducescatter",
    ],
    "process sets": [
        "collectives_sets:case_process_sets_work_side_by_side",
        "collectives_sets:case_world_and_set_in_one_function",
    ],
    "join": ["collectives_sets:case_join_with_different_numbers_of_steps"],
    "synchronised batch normalisation": [
        "equality:case_sync_batch_normalization",
        "sync_batch_norm:case_uneven_batches_and_masks",
    ],
    "compression": ["collectives_sparse:case_compression", "optimizer:case_compressed_gradients"],
    "objects and variables": [
        "collectives_sets:case_objects_of_any_size",
        "collectives_sets:case_variables_take_the_values_of_the_root",
    ],
    # Ours: the same numbers, and the same ends
    "equal to one process": [
        "equality:case_every_optimizer",
        "equality:case_every_model",
        "equality:case_layerwise_rates",
        "equality:case_bucket_sizes_and_clipping",
        "equality:case_plain_batch_normalization_is_ghost_batches",
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
    ],
    "sharded dense layers equal to one process": ["sharded_dense:case_uneven_local_batches"],
    "local SGD equal to single processes": [
        "local_sgd:case_every_step_with_sgd_is_synchronous",
        "local_sgd:case_callbacks_see_the_average_and_groups_go_on",
    ],
    "growing batches equal to one process": [
        "adaptive:case_growing_batches_equal_one_process",
        "adaptive:case_growing_batches_equal_one_process_in_other_exchanges",
    ],
    "several optimizers": ["late_ranks:case_two_optimizers_and_delays"],
    "a rank that stops stops all": [
        "fit:case_one_rank_stops_within_an_epoch_or_at_its_end",
        "fit:case_one_rank_stops_while_running_eagerly",
        "fit:case_terminate_on_nan",
    ],
    "no hang on unequal data": ["fit:case_data_of_unknown_length_runs_out"],
}
