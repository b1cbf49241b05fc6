"""The command `tfscale` and the call `tfscale.run`: start and watch ranks; check, plan and tune.

Modules that start and watch ranks do not import TensorFlow, so that `tfscale run` and the process
beside each rank stay small.
"""
