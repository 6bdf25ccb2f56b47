"""Models and data by name: finding, downloading and caching repositories of a Hugging Face hub."""
