"""Model files: download, tokenizer, chat template; and prefix hashes of prompts."""
