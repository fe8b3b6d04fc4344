# The stack in containers. A mode is a Compose project of its own, so modes run side by side, each with
# its volumes: `make up MODE=none RUN_API_PORT=8001 VLLM_PORT=9101 GPU_ID=1` beside another one.

# Label of the images that Compose builds.
export STACK_VERSION := $(file < shared/src/grpo_core/VERSION)

STACK_MODES := shared_vllm lora_only lora_restart none
PROJECT ?= grpo-$(MODE)
COMPOSE = docker compose --project-name $(PROJECT) --profile $(MODE)
TRAINER = trainer-$(subst _,-,$(MODE:shared_vllm=shared))

# A directory is mounted; anything else is a name on the hub, or the default.
STACK_SETTINGS = $(if $(MODEL),$(if $(wildcard $(MODEL)/.),MODEL=/model MODEL_DIR='$(abspath $(MODEL))',MODEL='$(MODEL)') LR=$(or $(LR),1e-5)) \
  $(if $(filter command line environment,$(origin TASK)),TASK=$(TASK)) $(if $(STEPS),STEPS=$(STEPS)) \
  $(if $(DATA),DATA='$(abspath $(DATA))') \
  $(if $(filter command line environment,$(origin SEED)),SEED=$(SEED)) \
  $(if $(CHECKPOINTS),CHECKPOINTS='$(if $(findstring /,$(CHECKPOINTS)),$(abspath $(CHECKPOINTS)),$(CHECKPOINTS))')

.PHONY: up down logs ps wait images config fetch-checkpoint stack-ready

# Settings are written once, when the engine can be asked what it has.
stack-ready:
	@bash containers/check_host.sh '$(MODE)' $(STACK_MODES)
	@test -e .env || bash containers/write_env.sh .env

up: stack-ready ## Start the stack in containers: MODE= [MODEL= TASK= STEPS= DATA= CHECKPOINTS=]
	@$(STACK_SETTINGS) $(COMPOSE) up --detach || { \
	  bash containers/explain.sh $(COMPOSE); \
	  echo "what did start goes on: make up again once this is mended, or make down MODE=$(MODE)"; exit 1; }
	@echo
	@echo "training in mode $(MODE). Next:"
	@echo "  make logs MODE=$(MODE)              what every service says"
	@echo "  make wait MODE=$(MODE)              until the trainer ends, with its exit status"
	@echo "  make fetch-checkpoint MODE=$(MODE)  the trained weights, into checkpoints/"
	@echo "  make down MODE=$(MODE)              end it (VOLUMES=1: and forget the run)"

down: stack-ready ## End it. An interrupted run can go on with `make up`; VOLUMES=1 removes its data too
	@$(COMPOSE) down $(if $(VOLUMES),--volumes)

logs: stack-ready ## Follow what the services say (SERVICE=<one of them>)
	@$(COMPOSE) logs --follow --tail 100 $(SERVICE)

ps: stack-ready ## Which containers run, and how they are
	@$(COMPOSE) ps --all

wait: stack-ready ## Wait for the trainer, and end with its exit status
	@bash containers/wait.sh $(TRAINER) $(COMPOSE)

images: stack-ready ## Build the images
	@$(COMPOSE) build

config: stack-ready ## What Compose makes of all settings
	@$(STACK_SETTINGS) $(COMPOSE) config

fetch-checkpoint: stack-ready ## Copy the trained weights into TO (checkpoints/)
	@mkdir -p '$(or $(TO),checkpoints)'
	@$(COMPOSE) cp $(TRAINER):/checkpoints/$(MODE) '$(or $(TO),checkpoints)'
	@echo "in $(or $(TO),checkpoints)/$(MODE)"
