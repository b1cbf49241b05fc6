"""`tfscale tune`: programs that measure, and recommend settings. Only `commands` is light."""
