# The chart on Kubernetes. The targets match those of Compose (containers/containers.mk), with kubectl's current
# context: `make helm-up MODE=none REGISTRY=registry.example.com/team`.

HELM ?= $(or $(wildcard $(BIN)/helm),helm)
RELEASE ?= grpo-$(subst _,-,$(MODE))
NAMESPACE ?= grpo
KUBECTL = kubectl --namespace $(NAMESPACE)

HELM_SETTINGS = --set mode=$(MODE) $(if $(REGISTRY),--set image.registry=$(REGISTRY)) \
  $(if $(MODEL),--set model.name=$(MODEL)) $(if $(or $(LR),$(MODEL)),--set run.lr=$(or $(LR),1e-5)) $(if $(STEPS),--set run.steps=$(STEPS)) \
  $(if $(filter command line environment,$(origin TASK)),--set environment.task=$(TASK)) \
  $(if $(filter command line environment,$(origin SEED)),--set run.seed=$(SEED)) $(if $(VALUES),--values $(VALUES)) $(HELM_FLAGS)

.PHONY: helm-up helm-down helm-logs helm-wait chart chart-snapshots test-helm

helm-up: ## Start a run on Kubernetes: MODE= [REGISTRY= MODEL= TASK= STEPS= NAMESPACE= RELEASE= VALUES= HELM_FLAGS=]
	@$(HELM) upgrade --install $(RELEASE) helm/grpo --namespace $(NAMESPACE) --create-namespace --wait --timeout 30m $(HELM_SETTINGS)

helm-wait: ## Show rewards until the trainer on Kubernetes ends; the exit status is 1 if it failed
	@bash helm/wait.sh $(RELEASE) $(KUBECTL)

helm-logs: ## Follow the logs of all services on Kubernetes, or of SERVICE=<component>
	@$(KUBECTL) logs --follow --tail 100 --prefix --all-containers --max-log-requests 20 --ignore-errors \
	  --selector app.kubernetes.io/instance=$(RELEASE)$(if $(SERVICE),$(comma)app.kubernetes.io/component=$(SERVICE))

helm-down: ## Stop the run on Kubernetes; `make helm-up` continues the run. VOLUMES=1 also deletes the run's data
	@$(HELM) uninstall $(RELEASE) --namespace $(NAMESPACE) --wait
	@$(if $(VOLUMES),$(KUBECTL) delete persistentvolumeclaim --selector app.kubernetes.io/instance=$(RELEASE))

comma := ,

chart: $(VENV)/.installed-dev # Lints the chart, renders and validates every shape, and runs its tests.
	@$(PYTEST) tests/chart

chart-snapshots: $(VENV)/.installed-dev ## Write the reviewed snapshots of the chart again
	@WRITE_SNAPSHOTS=1 $(PYTEST) tests/chart/test_shapes.py

test-helm: $(VENV)/.installed-dev ## Test the chart on a real Kubernetes of one node (first use: builds it in 8 minutes)
	@PATH=$(abspath $(BIN)):$$PATH bash tests/helm/with_cluster.sh $(PYTEST) tests/helm
