"""Files of texts to vectors in a store or a file: streaming, resumable, bounded in memory."""
