"""Tool calls and reasoning in answers, for the router's parser process."""
