"""Exchange strategies, the plans they compile to, and the executor that runs them.

The names are here, where they are read without TensorFlow.
"""

# One line registers an exchange: the name that users give, its module and its class.
EXCHANGES = {
    "allreduce": "tfscale.exchange.allreduce:Allreduce",
    "auto": "tfscale.exchange.auto:Auto",
    "chunked": "tfscale.exchange.chunked:Chunked",
    "sharded": "tfscale.exchange.sharded:Sharded",
}
