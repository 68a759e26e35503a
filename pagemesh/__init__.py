"""pagemesh: an LLM serving mesh that treats the KV cache as virtual memory."""
