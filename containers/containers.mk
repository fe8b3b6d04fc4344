# The stack in containers. Each mode is a Compose project with its own volumes, so several modes can run at
# the same time: `make up MODE=none RUN_API_PORT=8001 VLLM_PORT=9101 GPU_ID=1`.

# Labels of the images that Compose builds.
export STACK_VERSION := $(file < shared/grpo_core/VERSION)
export REVISION := $(or $(REVISION),$(shell git rev-parse HEAD 2>/dev/null))

STACK_MODES := shared_vllm lora_only lora_restart none
PROJECT ?= grpo-$(MODE)
COMPOSE = docker compose --project-name $(PROJECT) --profile $(MODE) $(if $(MONITORING),--profile monitoring)
TRAINER = trainer-$(subst _,-,$(MODE:shared_vllm=shared))

# A directory is mounted. Any other value is an id on the Hugging Face hub.
STACK_SETTINGS = $(if $(MODEL),$(if $(wildcard $(MODEL)/.),MODEL=/model MODEL_DIR='$(abspath $(MODEL))',MODEL='$(MODEL)') LR=$(or $(LR),1e-5)) \
  $(if $(filter command line environment,$(origin TASK)),TASK=$(TASK)) $(if $(STEPS),STEPS=$(STEPS)) \
  $(if $(DATA),DATA='$(abspath $(DATA))') $(if $(TASKS),TASKS='$(abspath $(TASKS))') \
  $(if $(filter command line environment,$(origin SEED)),SEED=$(SEED)) \
  $(if $(CHECKPOINTS),CHECKPOINTS='$(if $(findstring /,$(CHECKPOINTS)),$(abspath $(CHECKPOINTS)),$(CHECKPOINTS))')

.PHONY: up down logs ps wait images config fetch-checkpoint stack-ready

# The settings are written once, after the Docker engine has answered.
stack-ready:
	@bash containers/check_host.sh '$(MODE)' $(STACK_MODES)
	@test -e .env || bash containers/write_env.sh .env

up: stack-ready ## Start a run in containers: MODE= [REPLICAS= RANKS= MODEL= TASK= TASKS= STEPS= DATA= CHECKPOINTS= MONITORING=1]
	@$(STACK_SETTINGS) $(COMPOSE) up --detach || { \
	  bash containers/explain.sh $(COMPOSE); \
	  echo "the other services still run. Remove the cause and run make up again, or stop them: make down MODE=$(MODE)"; exit 1; }
	@echo
	@echo "training in mode $(MODE). Next:"
	@echo "  make logs MODE=$(MODE)              follow the logs of all services"
	@echo "  make wait MODE=$(MODE)              show rewards and wait until the trainer ends"
	@echo "  make fetch-checkpoint MODE=$(MODE)  copy the trained weights into checkpoints/"
	@echo "  make down MODE=$(MODE)              stop all services (VOLUMES=1: also delete the run's data)"

# Of the containers that run, whatever they were started with.
down logs ps: MONITORING = 1

down: stack-ready ## Stop the containers; `make up` continues the run. VOLUMES=1 also deletes the run's data
	@$(COMPOSE) down $(if $(VOLUMES),--volumes)

logs: stack-ready ## Follow the logs of all services, or of SERVICE=<name>
	@$(COMPOSE) logs --follow --tail 100 $(SERVICE)

ps: stack-ready ## List the containers and their state
	@$(COMPOSE) ps --all

wait: stack-ready ## Show rewards until the trainer ends; the exit status is the trainer's
	@bash containers/wait.sh $(TRAINER) $(COMPOSE)

images: export BUILD_ONLY := 1
images: stack-ready ## Build the images: [REGISTRY= [PUSH=1]] [SBOM=<directory>] [IMAGES="redis run-api"]
	@PATH="$$PATH:$(abspath $(BIN))" bash containers/images.sh $(STACK_VERSION)

config: stack-ready ## Print the resulting Compose configuration
	@$(STACK_SETTINGS) $(COMPOSE) config

fetch-checkpoint: stack-ready ## Copy the trained weights into TO (checkpoints/)
	@mkdir -p '$(or $(TO),checkpoints)'
	@$(COMPOSE) cp $(TRAINER):/checkpoints/$(MODE) '$(or $(TO),checkpoints)'
	@echo "copied to $(or $(TO),checkpoints)/$(MODE)"
