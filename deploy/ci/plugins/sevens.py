def reward(response):
    """The share of the response that is sevens."""
    return response.count("7") / max(len(response), 1)
