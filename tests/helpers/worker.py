from tfscale.testing.inspect import forget_process_sets

__all__ = ["forget_process_sets"]
