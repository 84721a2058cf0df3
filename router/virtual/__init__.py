"""Virtual models: a request that names one is answered by the model that ordered rules choose."""
