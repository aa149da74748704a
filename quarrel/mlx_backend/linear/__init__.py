"""Products with packed weights: matvec for rows that decode, matmul for rows of prompts."""
