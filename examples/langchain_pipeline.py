"""A chain of LangChain whose model is Quarrel's server."""

from __future__ import annotations

import sys

from serving import serving

try:
    from langchain_core.output_parsers import StrOutputParser
    from langchain_core.prompts import ChatPromptTemplate
    from langchain_openai import ChatOpenAI
except ImportError:
    sys.exit("needs LangChain: pip install langchain-openai")

with serving(sys.argv[1] if len(sys.argv) > 1 else "demo") as url:
    model = ChatOpenAI(model="demo", base_url=f"{url}/v1", api_key="none", max_tokens=24, seed=1)
    prompt = ChatPromptTemplate.from_messages([("system", "You tell tales."), ("user", "Tell me of {hero}.")])
    chain = prompt | model | StrOutputParser()
    for text in chain.batch([{"hero": "a king"}, {"hero": "a fox"}]):
        print(text.strip())
