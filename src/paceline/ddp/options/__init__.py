"""The wrapper's arguments and their defaults, checks of them and of the module, and buckets (:mod:`.buckets`)."""
