"""Between text and token ids: tokenising, chat templates, incremental decoding, stop strings."""
